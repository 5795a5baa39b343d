"""`elasticctl man`: the man pages of our commands, made from the tables of options."""

import re
from collections.abc import Sequence

from launcher import version
from launcher.ctl_commands import catalog
from launcher.ctl_commands.catalog import Argument, Command
from launcher.ctl_commands.running import CommandParser
from launcher.options import help as run_help

_TEXT = (
    "Print a man page. To read it: elasticctl man elasticrun | man -l -. To keep it: write it "
    "into ~/.local/share/man/man1/elasticrun.1."
)
_CTL = (
    "elasticctl shows and steers the jobs of elasticrun. It finds the only job that runs below the "
    "state directory, or the one of --run-id or --endpoint."
)


def man_parser() -> CommandParser:
    """Return the parser of `elasticctl man`."""
    parser = CommandParser(prog="elasticctl man", description=_TEXT, allow_abbrev=False)
    parser.add_argument("page", choices=("elasticrun", "elasticctl"), help="the command")
    return parser


def man(words: Sequence[str]) -> int:
    """Run `elasticctl man`."""
    given = man_parser().parse_args(list(words))
    print(elasticrun_page() if given.page == "elasticrun" else elasticctl_page(), end="")
    return 0


def elasticrun_page() -> str:
    """Return the page of `elasticrun`, in the macros of man(7)."""
    usage, _, text = run_help.HEAD.partition("\n\n")
    examples, _, statuses = run_help.TAIL.partition("\nExit status\n")
    parts = [
        _title("elasticrun", "train on hosts that come and go"),
        ".SH SYNOPSIS",
        _escaped(usage.removeprefix("usage: ")),
        ".SH DESCRIPTION",
        _escaped(" ".join(text.split())),
        ".SH OPTIONS",
    ]
    heading = ""
    for argument in catalog.elasticrun():
        if argument.heading != heading:
            heading = argument.heading
            parts.append(f".SS {_quoted(heading)}")
        parts.append(_entry(argument))
    parts += [".SH EXAMPLES", _as_it_is(examples.partition("\n")[2])]
    parts += [".SH EXIT STATUS", _escaped(" ".join(statuses.split()))]
    return "\n".join([*parts, ".SH SEE ALSO", ".BR elasticctl (1)", ""])


def elasticctl_page() -> str:
    """Return the page of `elasticctl`, in the macros of man(7)."""
    statuses = (
        "0 success; 1 if check found a bad node; 64 wrong usage; 75 no such job is running, or it "
        "does not answer; 130/143 interrupted."
    )
    parts = [
        _title("elasticctl", "see and steer the jobs of elasticrun"),
        ".SH SYNOPSIS",
        _escaped("elasticctl COMMAND [OPTIONS]"),
        ".SH DESCRIPTION",
        _escaped(_CTL),
        ".SH COMMANDS",
        *map(_command, catalog.elasticctl()),
        ".SH EXIT STATUS",
        _escaped(statuses),
    ]
    return "\n".join([*parts, ".SH SEE ALSO", ".BR elasticrun (1)", ""])


def _title(name: str, text: str) -> str:
    head = f'.TH {name.upper()} 1 "" "elastic-driver {version()}" "User Commands"'
    return f"{head}\n.SH NAME\n{name} \\- {text}"


def _command(command: Command) -> str:
    plain = [a.metavar for a in command.arguments if not a.names]
    head = f".SS {_quoted(' '.join([command.name, *plain]))}"
    more = "It also takes the options of elasticrun." if command.follows else ""
    text = _escaped(" ".join(f"{command.text} {more}".split()))
    return "\n".join([head, text, *map(_entry, command.arguments)])


def _entry(argument: Argument) -> str:
    """Return an option with its help."""
    value = f" \\fI{_escaped(argument.metavar)}\\fR" if argument.metavar else ""
    names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in argument.names)
    return f".TP\n{names}{value}\n{_escaped(argument.help) or 'See above.'}".replace("\n ", "\n")


def _as_it_is(text: str) -> str:
    return f".nf\n{_escaped(text.rstrip())}\n.fi"


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace('"', "\\(dq") + '"'


def _escaped(text: str) -> str:
    """Return text of which nothing is taken for a request or an escape of roff."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", plain, flags=re.MULTILINE)
