"""The `elasticbrain` command: from argv to an exit status."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from launcher.edge import handled, keep_memory_private, run_command

_DESCRIPTION = "Share the slots of hosts among jobs that were started with elasticrun --brain URL."
_EXAMPLES = """\
examples:
  elasticbrain serve -H n1:4,n2:4 --bind 10.0.0.1:29600
  elasticrun --brain https://10.0.0.1:29600 --brain-token-file job.token --run-id night train.py
  elasticbrain status
  elasticbrain monitor --source slurm --stats-db postgresql://ann@head/stats
  elasticbrain replay --against mine --stats-db sqlite:///stats.db -H n1:4,n2:4

The Brain writes job.token into its folder when it starts: copy it, readable by you alone, to where
you start jobs. Ctrl-C ends the Brain and no job: jobs keep their slots until it is back.

exit status: 64 wrong usage; 75 the address or the folder is in use; 130/143 ended by a signal.
"""
_PORT = 29600
_EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticbrain` with these arguments (default: the process's); return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("elasticbrain", lambda: _dispatch(words), ends=argv is None)


def _dispatch(words: list[str]) -> int:
    try:
        given = parser().parse_args(words)
    except SystemExit as leaving:  # argparse has printed its help
        return int(leaving.code or 0)
    keep_memory_private()
    act: Callable[[argparse.Namespace], int] = given.act
    return act(given)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` for a wrong command."""

    def error(self, message: str) -> NoReturn:
        from elastic_driver.errors import UsageError  # noqa: PLC0415 - see `run_command`

        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `elasticbrain`."""
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    form |= {"epilog": _EXAMPLES, "allow_abbrev": False}
    from launcher.brain import monitor, replay  # noqa: PLC0415 - see `run_command`

    top = _Parser(prog="elasticbrain", description=_DESCRIPTION, **form)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="run a Brain until Ctrl-C", description=_DESCRIPTION, **form
    )
    _add_serve(serve)
    text = "Show the hosts and jobs of a Brain, who has which slots, and why."
    shown = commands.add_parser("status", help="show hosts and jobs", description=text)
    shown.add_argument("--json", action="store_true", help="the whole document")
    text = "Free the slots of a silent job. Be sure that no process of it lives on any host."
    forget = commands.add_parser("forget", help="free the slots of a silent job", description=text)
    forget.add_argument("job", metavar="JOB", help="its name in elasticbrain status")
    monitor.add_parser(commands)
    replay.add_parser(commands)
    for each, act in ((serve, run_serve), (shown, run_status), (forget, run_forget)):
        each.set_defaults(act=act)
        each.add_argument(
            "--state-dir",
            metavar="DIR",
            help="the Brain's folder (default: ~/.local/state/elastic-brain)",
        )
    return top


def _add_serve(serve: argparse.ArgumentParser) -> None:
    hosts = serve.add_mutually_exclusive_group(required=True)
    hosts.add_argument("-H", "--hosts", metavar="h1:4,h2:4", help="the hosts with their slots")
    hosts.add_argument(
        "--hostfile", metavar="FILE", help="the hosts, one a line; read again when it changes"
    )
    hosts.add_argument(
        "--host-discovery-script", metavar="FILE", help="a program that prints the hosts"
    )
    serve.add_argument(
        "--slots-per-host", metavar="N", default="1", help="slots of a host without a number (1)"
    )
    serve.add_argument(
        "--bind",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{_PORT}",
        help="the address to listen on; with an address of the network, over TLS only "
        "(default: %(default)s)",
    )
    serve.add_argument(
        "--algorithm",
        metavar="NAME",
        default="",
        help="the algorithm that plans, of an installed package (default: fair)",
    )
    serve.add_argument(
        "--stats-db",
        metavar="URL",
        help="the database into which elasticbrain monitor writes how busy the hosts are",
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="a certificate of your own (PEM)")
    serve.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    serve.add_argument("--tls-ca", metavar="FILE", help="your CA, by which jobs know the Brain")


def run_serve(given: argparse.Namespace) -> int:
    """Run a Brain until a signal; return the exit status."""
    from elastic_driver.console import say  # noqa: PLC0415 - see `run_command`
    from launcher.brain.service import BrainService  # noqa: PLC0415
    from launcher.brain.setup import setup_of  # noqa: PLC0415

    setup = setup_of(given, lambda line: say(f"elasticbrain: {line}"))
    try:
        service = BrainService(setup)
        with handled(_EXITS, lambda number: service.stop(_EXITS[signal.Signals(number)])):
            return service.run()
    finally:
        setup.folder.close()


def run_status(given: argparse.Namespace) -> int:
    """Print the status of the Brain of this folder."""
    from launcher.brain.setup import folder_of  # noqa: PLC0415 - see `run_command`
    from launcher.brain.status import ask, render  # noqa: PLC0415

    document = ask(folder_of(given))
    print(document.decode() if given.json else render(msgspec.json.decode(document)))
    return 0


def run_forget(given: argparse.Namespace) -> int:
    """Have the Brain of this folder forget a job."""
    from launcher.brain.setup import folder_of  # noqa: PLC0415 - see `run_command`
    from launcher.brain.status import forget  # noqa: PLC0415

    forget(folder_of(given), given.job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
