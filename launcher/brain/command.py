"""The `elasticbrain` command: from argv to an exit status."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from launcher.edge import keep_memory_private, run_command

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
_FORM: dict[str, Any] = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}
_MONITOR = """\
Write how busy machines are into the statistics database, every 5 seconds until Ctrl-C.

sources:
  agents      the machine that this runs on: start it on each host
  prometheus  the node_exporter of each host that -H names
  slurm       the nodes of Slurm, by sinfo
Other packages may bring more.
"""
_MONITOR_EXAMPLE = """\
example:
  elasticbrain monitor --source prometheus -H n1:4,n2:4 --tls-ca ca.pem \\
      --stats-db 'postgresql://ann@head/stats?sslrootcert=ca.pem'
"""
_REPLAY = """\
Play recorded jobs through two algorithms, and show what each job would have trained.

Each job is there from its recorded beginning to its end, and as fast as it was measured at each
size; the speed at other sizes is extrapolated, and marked. The same input gives the same output.
"""
_REPLAY_EXAMPLE = """\
example:
  elasticbrain replay --algorithm fair --against mine --stats-db sqlite:///stats.db -H n1:4,n2:4
"""
_DATABASE = "the statistics: postgresql://USER@HOST/DATABASE, sqlite:///FILE, or FILE"


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
    from launcher.brain import commands  # noqa: PLC0415 - loads much, which --help does not need

    act: Callable[[argparse.Namespace], int] = getattr(commands, f"run_{given.command}")
    return act(given)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` for a wrong command."""

    def error(self, message: str) -> NoReturn:
        from elastic_driver.errors import UsageError  # noqa: PLC0415 - see `run_command`

        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `elasticbrain`; `commands` has a function for each subcommand."""
    form = {"epilog": _EXAMPLES, "description": _DESCRIPTION, **_FORM}
    top = _Parser(prog="elasticbrain", **form)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run a Brain until Ctrl-C", **form)
    _add_serve(serve)
    text = "Show the hosts and jobs of a Brain, who has which slots, and why."
    shown = commands.add_parser("status", help="show hosts and jobs", description=text)
    shown.add_argument("--json", action="store_true", help="the whole document")
    text = "Free the slots of a silent job. Be sure that no process of it lives on any host."
    forget = commands.add_parser("forget", help="free the slots of a silent job", description=text)
    forget.add_argument("job", metavar="JOB", help="its name in elasticbrain status")
    _add_monitor(commands)
    _add_replay(commands)
    for each in (serve, shown, forget):
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


def _add_monitor(commands: Any) -> None:
    monitor = commands.add_parser(
        "monitor",
        help="write how busy machines are into the statistics",
        description=_MONITOR,
        epilog=_MONITOR_EXAMPLE,
        **_FORM,
    )
    monitor.add_argument(
        "--source", metavar="NAME", required=True, help="agents, prometheus, slurm, or another one"
    )
    monitor.add_argument("--stats-db", metavar="URL", required=True, help=_DATABASE)
    monitor.add_argument(
        "-H", "--hosts", metavar="h1:4,h2:4", help="the hosts with their slots (default: all)"
    )
    monitor.add_argument(
        "--slots-per-host", metavar="N", help="slots of a host (default: its processors)"
    )
    monitor.add_argument(
        "--port", metavar="N", help="where a node_exporter listens (default: 9100)"
    )
    monitor.add_argument(
        "--tls-ca",
        metavar="FILE",
        default="",
        help="the CA of the node_exporters' certificates (default: those of the system)",
    )
    monitor.add_argument(
        "--insecure",
        action="store_true",
        help="ask the node_exporters of other machines in plain, too",
    )


def _add_replay(commands: Any) -> None:
    from elastic_driver.brain.algorithm import BUILT_IN  # noqa: PLC0415 - see `run_command`

    replay = commands.add_parser(
        "replay",
        help="play recorded jobs through two algorithms",
        description=_REPLAY,
        epilog=_REPLAY_EXAMPLE,
        **_FORM,
    )
    replay.add_argument(
        "--algorithm", metavar="A", default=BUILT_IN, help="an algorithm (default: %(default)s)"
    )
    replay.add_argument("--against", metavar="B", required=True, help="the other algorithm")
    replay.add_argument("--stats-db", metavar="URL", required=True, help=_DATABASE)
    replay.add_argument(
        "-H",
        "--hosts",
        metavar="h1:4,h2:4",
        help="the hosts to play on (default: those that elasticbrain monitor has seen)",
    )


if __name__ == "__main__":
    sys.exit(main())
