"""All commands and options as data, for shell completion and man pages.

They come from the same tables and parsers that read the command line.
"""

import importlib
from argparse import Action
from collections.abc import Iterable
from typing import NamedTuple

from elastic_driver.options import Heading
from launcher.ctl_commands import check, running
from launcher.ctl_commands.running import CommandParser
from launcher.options.table import OPTIONS, Option

# The modules of the commands with a parser of their own: `<command>_parser` there returns it.
_PARSERS = {
    "report": "report",
    "explain": "journal",
    "replay": "journal",
    "completion": "completion",
    "man": "man",
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
