"""`elasticctl completion bash|zsh`: the script by which a shell completes our commands.

It is made from the tables of options, has all names in it, and starts no Python when it is used.
"""

import shlex
from collections.abc import Iterable, Sequence

from launcher.ctl_commands import catalog
from launcher.ctl_commands.catalog import Argument, Command
from launcher.ctl_commands.running import CommandParser

_TEXT = (
    "Print a script for the shell, which then completes the options of elasticrun and elasticctl. "
    'For bash put eval "$(elasticctl completion bash)" into ~/.bashrc; for zsh write the script '
    "into a file _elasticctl in a folder of $fpath."
)
_RUNS = 'ls "${XDG_STATE_HOME:-$HOME/.local/state}/elastic-driver" 2>/dev/null'


def completion_parser() -> CommandParser:
    """Return the parser of `elasticctl completion`."""
    parser = CommandParser(prog="elasticctl completion", description=_TEXT, allow_abbrev=False)
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
    options, commands = catalog.elasticrun(), catalog.elasticctl()
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
    more = _names(catalog.elasticrun()) if command.follows else []
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
    commands = catalog.elasticctl()
    names = "\n".join(f"        {_quoted(c.name, _short(c.text))}" for c in commands)
    cases = []
    for command in commands:
        more = catalog.elasticrun() if command.follows else ()
        plain = [a for a in command.arguments if not a.names]
        specs = [_position(n, a) for n, a in enumerate(plain, start=1)]
        specs += [spec for a in (*command.arguments, *more) for spec in _specs(a)]
        lines = " \\\n            ".join(specs)
        cases.append(f"    {command.name})\n        _arguments {lines}\n        ;;")
    options = " \\\n".join(f"        {s}" for a in catalog.elasticrun() for s in _specs(a))
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
