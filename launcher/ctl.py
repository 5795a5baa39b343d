"""The `elasticctl` command: from argv to an exit status.

The subcommands are in `launcher.ctl_commands`; a module is imported when its subcommand is called.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from launcher.edge import refuse_bytes, run_command

_HELP = """\
usage: elasticctl COMMAND [OPTIONS]

A running job
  open                        an address at which a browser shows the job, live
  top                         the same live, with keys to drain a host or see the stacks
  hosts [--json]              its hosts
  stacks [--last]             the stack of every rank, equal ones together
  scale N                     ask for another number of workers
  apply PLAN.yaml             change its workers, slots per host, CPUs and memory per worker
  drain HOST [--deadline S]   make a host's workers leave at a step boundary; --cancel undoes it
  stop                        end it; elasticrun returns 143
The job is the only one that runs below the state directory (--state-dir D), or the one of
--run-id ID, or of --endpoint URL with --token-file F.

A job that runs or is over
  status [--json] [--watch]   the job, its hosts and its workers; or how each worker has ended
  events [-f] [--since N]     its events so far, and with -f those to come
  logs [-f] [--rank R]        what its workers write
  explain rank R | host H     what happened to it, and because of which event
  report [LOG] [--html]       duration, workers over time, failures, and where the time went
  replay [JOURNAL] [--at N]   every event and decision, and the job after event N
The job is the one of --run-id ID, the only one that runs, or else the newest of all.

Without a job
  check [OPTIONS] [HOSTS…]    which of these hosts are faulty or slow
  config show [OPTIONS]       the value of every option of elasticrun, and its source
  completion bash|zsh         a script by which the shell completes both commands
  man elasticrun|elasticctl   a man page

`elasticctl COMMAND --help` shows more. Exit status: 0 success; 1 if check found a bad node; 64
wrong usage; 75 no such job is running, or it does not answer; 130/143 interrupted.
"""

# The modules of the commands that need no running job; all other commands do.
_WITHOUT_JOB = {
    "report": "report",
    "replay": "explain",
    "explain": "explain",
    "check": "check",
    "config": "check",
    "completion": "catalog",
    "man": "catalog",
}
COMMANDS = (
    "status",
    "top",
    "open",
    "events",
    "hosts",
    "logs",
    "stacks",
    "scale",
    "apply",
    "drain",
    "stop",
    *_WITHOUT_JOB,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticctl` with these arguments (default: the process's); return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("elasticctl", lambda: _dispatch(words), ends=argv is None)


def _dispatch(words: list[str]) -> int:
    from elastic_driver.errors import UsageError  # noqa: PLC0415 - see `run_command`

    for word in words:
        refuse_bytes("an argument", word)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if words else 64
    name, *rest = words
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise UsageError(f"{name!r} is no command; there is {known} (elasticctl --help)")
    try:
        if name in _WITHOUT_JOB:
            module = import_module(f"launcher.ctl_commands.{_WITHOUT_JOB[name]}")
            return int(getattr(module, name)(rest))
        return int(import_module("launcher.ctl_commands.running").run(name, rest))
    except SystemExit as leaving:  # argparse has printed its help
        return int(leaving.code or 0)


if __name__ == "__main__":
    sys.exit(main())
