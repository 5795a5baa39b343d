"""The `elasticctl` command: from argv to an exit status.

Every subcommand is a function in `launcher.ctl_commands` that takes the words after its name. Its
module is imported when it is called.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from launcher.edge import run_command

_HELP = """\
usage: elasticctl COMMAND [OPTIONS]

A running job
  status [--json] [--watch]   the job, its hosts and its workers
  events [-f] [--since N]     the events so far, and with -f those to come
  hosts [--json]              its hosts
  stacks [--last]             the stack of every rank, equal ones together
  scale N                     ask for another number of workers
  drain HOST [--deadline S]   have a host's workers leave in good order; --cancel takes it back
  stop                        end it; elasticrun returns 143
It is the only one running below the state directory, or the one named by --run-id ID,
--state-dir D, or --endpoint URL with --token-file F.

Without a job
  check [OPTIONS] [HOSTS…]    which of these hosts are faulty or slow
  config show [OPTIONS]       the value of every option of elasticrun, and its source

`elasticctl COMMAND --help` says more. Exit status: 0; 1 where check found a bad node; 64 wrong
usage; 75 no such job is running, or it does not answer; 130/143 interrupted.
"""

# Subcommand → module and function.
_COMMANDS = {
    "status": ("running", "status"),
    "events": ("running", "events"),
    "hosts": ("running", "hosts"),
    "stacks": ("running", "stacks"),
    "scale": ("running", "scale"),
    "drain": ("running", "drain"),
    "stop": ("running", "stop"),
    "check": ("check", "check"),
    "config": ("config", "config"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticctl` with these arguments (default: the process's); return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("elasticctl", lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    from elastic_driver.errors import UsageError  # noqa: PLC0415

    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if words else 64
    if words[0] not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        raise UsageError(f"{words[0]!r} is no command; there is {known} (elasticctl --help)")
    module, name = _COMMANDS[words[0]]
    command: Callable[[list[str]], int] = getattr(
        import_module(f"launcher.ctl_commands.{module}"), name
    )
    try:
        return command(words[1:])
    except SystemExit as leaving:  # argparse has shown the help that was asked for
        return int(leaving.code or 0)


if __name__ == "__main__":
    sys.exit(main())
