"""All commands and options as data, and what is made of them: shell completion and man pages.

The data come from the same tables and parsers that read the command line. `elasticctl completion
bash|zsh` prints the script by which a shell completes our commands: it has all names in it, and
starts no Python when it is used. `elasticctl man` prints a man page.
"""

import importlib
import re
import shlex
from argparse import Action
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from elastic_driver.options import Heading
from launcher import version
from launcher.ctl_commands import check, running
from launcher.ctl_commands.running import CommandParser
from launcher.options import given as run_help
from launcher.options.table import OPTIONS, Option

# ---- the data -----------------------------------------------------------------------------


# The modules of the commands with a parser of their own: `<command>_parser` there returns it.
_PARSERS = {
    "report": "report",
    "explain": "explain",
    "replay": "explain",
    "completion": "catalog",
    "man": "catalog",
}


class Argument(NamedTuple):
    """An option, or a word that stands by itself (`names` is empty then)."""

    names: tuple[str, ...]
    metavar: str  # empty: the option takes no value
    help: str
    words: int = 1  # that follow the option, if any
    heading: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The values that have a name."""
        parts = self.metavar.split("|")
        return tuple(p for p in parts if p.isidentifier() and p.islower() and len(parts) > 1)


class Command(NamedTuple):
    """A subcommand of `elasticctl`; its text has one sentence or more."""

    name: str
    text: str
    arguments: tuple[Argument, ...]
    follows: bool = False  # options of elasticrun may follow


def elasticrun() -> tuple[Argument, ...]:
    """Return the options of `elasticrun`, in the order of `--help`."""
    return tuple(_of_table(o) for heading in Heading for o in OPTIONS if o.heading is heading)


def elasticctl() -> tuple[Command, ...]:
    """Return the subcommands of `elasticctl`."""
    return (*(_of_parser(name, parser) for name, parser in parsers().items()), *_others())


def parsers() -> dict[str, CommandParser]:
    """Return the parser of each subcommand that has one of its own, by name."""
    found = {name: running.make_parser(name) for name in running.ACTIONS}
    for name, module in _PARSERS.items():
        imported = importlib.import_module(f"launcher.ctl_commands.{module}")
        found[name] = getattr(imported, f"{name}_parser")()
    return found


def _others() -> Iterable[Command]:
    """Yield the commands that are read like `elasticrun`."""
    history = Argument((check.HISTORY,), "", "show the results of earlier checks")
    hosts = Argument((), "HOSTS…", "as for elasticrun -H; by default this machine")
    text = "Run short tasks on hosts in changing pairs, and show which are faulty or slow."
    yield Command("check", text, (history, hosts), follows=True)
    show = Argument((), "show", "the only word")
    text = "Show the value of every option of elasticrun, and its source."
    yield Command("config", text, (show,), follows=True)


def _of_table(option: Option) -> Argument:
    default = f" [{option.default_text}]" if option.default_text else ""
    words, metavar = option.kind.words, option.kind.metavar
    return Argument(option.spellings, metavar, option.help + default, words, option.heading.value)


def _of_parser(name: str, parser: CommandParser) -> Command:
    known = [action for action in parser.actions if action.dest != "help"]
    return Command(name, parser.description or "", tuple(map(_of_action, known)))


def _of_action(action: Action) -> Argument:
    choices = "|".join(map(str, action.choices or ()))
    metavar = "" if action.nargs == 0 else str(choices or action.metavar or action.dest.upper())
    return Argument(tuple(action.option_strings), metavar, action.help or "")


# ---- completion ---------------------------------------------------------------------------


_COMPLETION = (
    "Print a script for the shell, which then completes the options of elasticrun and elasticctl. "
    'For bash put eval "$(elasticctl completion bash)" into ~/.bashrc; for zsh write the script '
    "into a file _elasticctl in a folder of $fpath."
)
_RUNS = 'ls "${XDG_STATE_HOME:-$HOME/.local/state}/elastic-driver" 2>/dev/null'


def completion_parser() -> CommandParser:
    """Return the parser of `elasticctl completion`."""
    parser = CommandParser(
        prog="elasticctl completion", description=_COMPLETION, allow_abbrev=False
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    return parser


def completion(words: Sequence[str]) -> int:
    """Run `elasticctl completion`."""
    given = completion_parser().parse_args(list(words))
    print(_bash() if given.shell == "bash" else _zsh(), end="")
    return 0


# ---- bash --------------------------------------------------------------------------------

_BASH = """\
# bash completion of elasticrun and elasticctl; made by: elasticctl completion bash

_elastic_values() {{  # the values of an option, if they are known
    case $1 in
{values}
    --run-id) {runs} ;;
    esac
}}

_elastic_words() {{  # words: those of a command
    case $1 in
{commands}
    esac
}}

_elasticctl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} values
    values=$(_elastic_values "${{COMP_WORDS[COMP_CWORD-1]}}")
    if [[ -z $values && $COMP_CWORD -eq 1 ]]; then
        values={names}
    elif [[ -z $values ]]; then
        values=$(_elastic_words "${{COMP_WORDS[1]}}")
    fi
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
}}

_elasticrun() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} i=1 values
    COMPREPLY=()
    while (( i < COMP_CWORD )); do  # a word that belongs to no option begins the COMMAND
        case ${{COMP_WORDS[i]}} in
        {two}) (( i += 3 )) ;;
        {one}) (( i += 2 )) ;;
        --) return ;;
        -*) (( i += 1 )) ;;
        *) return ;;
        esac
    done
    values=$(_elastic_values "$before")
    if [[ -z $values && $i -eq $COMP_CWORD && $current == -* ]]; then
        values=$(_elastic_words elasticrun)
    fi
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
}}

complete -o default -F _elasticctl elasticctl
complete -o default -F _elasticrun elasticrun
"""


def _bash() -> str:
    options = elasticrun()
    commands = elasticctl()
    arguments = [*options, *(a for command in commands for a in command.arguments)]
    listed = {"|".join(a.names): " ".join(a.values) for a in arguments if a.names and a.values}
    values = "\n".join(f"    {names}) echo {words} ;;" for names, words in listed.items())
    own = {command.name: _words(command) for command in commands}
    all_own = {"elasticrun": " ".join(_names(options)), **own}
    shown = "\n".join(f"    {name}) echo {shlex.quote(w)} ;;" for name, w in all_own.items())
    two = [name for a in options if a.words == 2 for name in a.names]
    one = [name for a in options if a.words == 1 for name in a.names]
    return _BASH.format(
        values=values,
        runs=_RUNS,
        commands=shown,
        names=shlex.quote(" ".join(command.name for command in commands)),
        two="|".join(two),
        one="|".join(one),
    )


def _words(command: Command) -> str:
    """Return the words that may follow a command."""
    plain = [word for a in command.arguments if not a.names for word in a.values]
    only = [a.metavar for a in command.arguments if not a.names and a.metavar.islower()]
    more = _names(elasticrun()) if command.follows else []
    return " ".join(dict.fromkeys([*plain, *only, *_names(command.arguments), *more, "--help"]))


def _names(arguments: Iterable[Argument]) -> list[str]:
    return [name for a in arguments for name in a.names]


# ---- zsh ---------------------------------------------------------------------------------

_ZSH = """\
#compdef elasticctl elasticrun
# zsh completion of elasticrun and elasticctl; made by: elasticctl completion zsh

_elastic_runs() {{
    local -a runs
    runs=(${{(f)"$({runs})"}})
    _describe run runs
}}

_elasticctl_commands() {{
    local -a commands
    commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{commands}
    esac
}}

_elasticrun_options() {{
    _arguments -S \\
{options} \\
        '(-)1:command:_files' '*::argument:_files'
}}

_elasticctl() {{  # for both: this file is loaded once
    case $service in
    elasticrun) _elasticrun_options ;;
    *) _elasticctl_commands ;;
    esac
}}

_elasticctl "$@"
"""


def _zsh() -> str:
    commands = elasticctl()
    names = "\n".join(f"        {_quoted(c.name, _short(c.text))}" for c in commands)
    cases = []
    for command in commands:
        more = elasticrun() if command.follows else ()
        plain = [a for a in command.arguments if not a.names]
        specs = [_position(n, a) for n, a in enumerate(plain, start=1)]
        specs += [spec for a in (*command.arguments, *more) for spec in _specs(a)]
        lines = " \\\n            ".join(specs)
        cases.append(f"    {command.name})\n        _arguments {lines}\n        ;;")
    options = " \\\n".join(f"        {s}" for a in elasticrun() for s in _specs(a))
    return _ZSH.format(runs=_RUNS, names=names, commands="\n".join(cases), options=options)


def _position(number: int, argument: Argument) -> str:
    """Return a word that stands by itself as zsh's `_arguments` takes it."""
    several = argument.metavar.endswith("…")
    values = argument.values or ((argument.metavar,) if argument.metavar.islower() else ())
    return shlex.quote(f"{'*' if several else number}:{_value(argument, values)}")


def _value(argument: Argument, values: Sequence[str]) -> str:
    what = argument.metavar.replace(":", "\\:")
    return f"{what}:({' '.join(values)})" if values else f"{what}:_files"


def _specs(argument: Argument) -> list[str]:
    """Return an option as zsh's `_arguments` takes it, once for each of its names."""
    value = _value(argument, argument.values)
    if "--run-id" in argument.names:
        value = "ID:_elastic_runs"
    follows = f":{value}" * (argument.words if argument.metavar else 0)
    said = _short(argument.help).replace("[", "(").replace("]", ")").replace(":", "\\:")
    return [shlex.quote(f"{name}[{said}]{follows}") for name in argument.names]


def _quoted(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text}")


def _short(text: str) -> str:
    """Return the first sentence, without its full stop."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


# ---- man pages ----------------------------------------------------------------------------


_MAN = (
    "Print a man page. To read it: elasticctl man elasticrun | man -l -. To keep it: write it "
    "into ~/.local/share/man/man1/elasticrun.1."
)
_CTL = (
    "elasticctl shows and steers the jobs of elasticrun. It finds the only job that runs below the "
    "state directory, or the one of --run-id or --endpoint."
)


def man_parser() -> CommandParser:
    """Return the parser of `elasticctl man`."""
    parser = CommandParser(prog="elasticctl man", description=_MAN, allow_abbrev=False)
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
    for argument in elasticrun():
        if argument.heading != heading:
            heading = argument.heading
            parts.append(f".SS {_roff_quoted(heading)}")
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
        *map(_command, elasticctl()),
        ".SH EXIT STATUS",
        _escaped(statuses),
    ]
    return "\n".join([*parts, ".SH SEE ALSO", ".BR elasticrun (1)", ""])


def _title(name: str, text: str) -> str:
    head = f'.TH {name.upper()} 1 "" "elastic-driver {version()}" "User Commands"'
    return f"{head}\n.SH NAME\n{name} \\- {text}"


def _command(command: Command) -> str:
    plain = [a.metavar for a in command.arguments if not a.names]
    head = f".SS {_roff_quoted(' '.join([command.name, *plain]))}"
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


def _roff_quoted(text: str) -> str:
    return '"' + _escaped(text).replace('"', "\\(dq") + '"'


def _escaped(text: str) -> str:
    """Return text of which nothing is taken for a request or an escape of roff."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", plain, flags=re.MULTILINE)
