"""Which value every option has, and who said so: flags > environment > file > defaults.

`launcher.job` calls `resolve` once. Nothing here opens a file or starts anything except reading
the configuration file that was named; every mistake is a `UsageError` of one line.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from elastic_driver.errors import UsageError
from launcher.commandline.configfile import FileEntry, read_config
from launcher.options import (
    CONFIG_FILE,
    ENV,
    FOREIGN,
    NEEDLESS,
    OPTIONS,
    PET_OPTIONS,
    Option,
)
from launcher.options.kinds import Words

T = TypeVar("T")

Layer = dict[Option[Any], tuple[Words, str]]  # option → its words, and where they stand

_PREFIX = "ELASTICRUN_"


@dataclass(frozen=True)
class Setting:
    """A value and where it came from (`command line`, a variable, `file line n`, `default`)."""

    value: Any
    source: str
    level: int = 0  # 0 default, 1 file, 2 environment, 3 command line


class Values:
    """The value of every option: `values[MIN_NP]`; `source(MIN_NP)` says who set it."""

    def __init__(self, settings: Mapping[Option[Any], Setting]) -> None:
        self._settings = dict(settings)

    def __getitem__(self, option: Option[T]) -> T:
        return cast("T", self._settings[option].value)

    def source(self, option: Option[Any]) -> str:
        """Where the option's value came from."""
        return self._settings[option].source

    def level(self, option: Option[Any]) -> int:
        """How much its source counts: 0 default, 1 file, 2 environment, 3 command line."""
        return self._settings[option].level

    def replaced(self, option: Option[T], setting: Setting) -> Values:
        """The same values but for this one."""
        return Values({**self._settings, option: setting})

    def origins(self) -> tuple[tuple[str, str, str], ...]:
        """(option, value, source) of everything that was set, in the order of the table."""
        return tuple(
            (option.long, _shown(option, self[option]), self.source(option))
            for option in OPTIONS
            if self.level(option)
        )


@dataclass(frozen=True)
class CommandLine:
    """What was asked for: the options, the command to run (may be empty), and remarks to make."""

    values: Values
    command: tuple[str, ...]
    warnings: tuple[str, ...]


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read argv (without the program's name), the environment and the configuration file.

    Raises:
        UsageError: an option is unknown, or a value cannot be read; names option and source.
    """
    given, command, remarks = split(argv)
    from_environment, warnings = _from_environment(environ)
    from_argv: Layer = {option: (words, "command line") for option, words in given.items()}
    from_file: Layer = {}
    config = from_argv.get(CONFIG_FILE) or from_environment.get(CONFIG_FILE)
    if config is not None:
        path = Path(_read(CONFIG_FILE, *config))
        from_file = _from_file(path, read_config(path))
    settings = {option: Setting(option.default, "default") for option in OPTIONS}
    for level, layer in enumerate((from_file, from_environment, from_argv), start=1):
        for option, (words, source) in layer.items():
            settings[option] = Setting(_read(option, words, source), source, level)
    return CommandLine(Values(settings), command, (*remarks, *warnings))


# ---- argv --------------------------------------------------------------------------------

_BY_SPELLING: dict[str, Option[Any]] = {
    spelling: option for option in OPTIONS for spelling in (option.long, *option.aliases)
}
_SHORT = sorted((s for s in _BY_SPELLING if not s.startswith("--")), key=len, reverse=True)


def split(
    argv: Sequence[str],
) -> tuple[dict[Option[Any], Words], tuple[str, ...], tuple[str, ...]]:
    """The words of each option given; the command, everything from its first word on; remarks."""
    given: dict[Option[Any], Words] = {}
    remarks: list[str] = []
    rest = list(argv)
    while rest:
        if rest[0] == "--":
            return given, tuple(rest[1:]), tuple(remarks)
        if rest[0] in ("-m", "--module"):  # `-m module` is a command, as for python itself
            return given, ("-m", *rest[1:]), tuple(remarks)
        if not rest[0].startswith("-") or rest[0] == "-":
            return given, tuple(rest), tuple(remarks)
        spelling, attached = _split_argument(rest.pop(0))
        if spelling in NEEDLESS:
            words, reason = NEEDLESS[spelling]
            del rest[: words if attached is None else 0]
            remarks.append(f"{spelling} is passed over: {reason}")
            continue
        option = _find(spelling)
        taken = _take(option, spelling, attached, rest)
        given[option] = given.get(option, ()) + taken if option.kind.repeat else taken
    return given, (), tuple(remarks)


def _split_argument(argument: str) -> tuple[str, str | None]:
    """`--min_np=2` as `--min-np` and `2`; `-H=a` and `-Ha` as `-H` and `a`."""
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name.replace("_", "-"), value if equals else None
    if argument in _BY_SPELLING:
        return argument, None
    for short in _SHORT:
        if argument.startswith(short) and _BY_SPELLING[short].kind.words == 1:
            return short, argument[len(short) :].removeprefix("=")
    return argument, None


def _find(spelling: str) -> Option[Any]:
    option = _BY_SPELLING.get(spelling)
    if option is not None:
        return option
    if spelling in FOREIGN:
        raise UsageError(f"{spelling} does not exist here; {FOREIGN[spelling]}")
    raise UsageError(f"unknown option {spelling}{_did_you_mean(spelling, _BY_SPELLING)}")


def _take(option: Option[Any], spelling: str, attached: str | None, rest: list[str]) -> Words:
    """The option's words, removed from the rest of argv."""
    wanted = option.kind.words
    if wanted == 0:
        return () if attached is None else (attached,)
    if attached is not None:
        return tuple(attached.replace(",", " ").split()) if wanted > 1 else (attached,)
    words = tuple(rest[:wanted])
    if len(words) < wanted or any(_split_argument(w)[0] in _BY_SPELLING for w in words):
        raise UsageError(f"{spelling} needs a value: {spelling} {option.kind.metavar}")
    del rest[:wanted]
    return words


def _did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; see elasticrun --help"


# ---- environment and file ----------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    by_variable = {
        "PET_" + s.removeprefix("--").replace("-", "_").upper(): _BY_SPELLING[s]
        for s in PET_OPTIONS
    } | {option.variable: option for option in OPTIONS}
    layer: Layer = {}
    warnings = []
    for name in sorted(environ, key=lambda name: (name.startswith(_PREFIX), name)):  # ours win
        if name in by_variable:
            option = by_variable[name]
            layer[option] = (_words(option, environ[name], name), name)
        elif name.startswith(_PREFIX):
            hint = _did_you_mean(name, by_variable)
            warnings.append(f"the environment variable {name} sets no option{hint}")
    return layer, tuple(warnings)


def _from_file(path: Path, entries: Sequence[FileEntry]) -> Layer:
    by_name = {option.name: option for option in OPTIONS}
    layer: Layer = {}
    for entry in entries:
        source = f"{path} line {entry.line}"
        name = entry.key.replace("_", "-")
        if name not in by_name:
            hint = _did_you_mean(name, by_name)
            raise UsageError(f"{source}: {entry.key!r} is not an option{hint}")
        option = by_name[name]
        if option in layer:
            raise UsageError(f"{source}: {entry.key!r} is given twice; keep one of them")
        words = _words(option, entry.text, source) if entry.words is None else entry.words
        if len(words) > 1 and option.kind.words == 1 and not option.kind.repeat:
            words = (",".join(words),)  # a YAML list where the command line has commas
        layer[option] = (words, source)
    return layer


def _words(option: Option[Any], text: str, source: str) -> Words:
    """One text as the words that stand on the command line for it."""
    if not option.kind.repeat and option.kind.words <= 1:
        return (text,)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{source}: {text!r}: {error}") from None


def _read(option: Option[Any], words: Words, source: str) -> Any:
    try:
        return option.kind.read(words)
    except ValueError as error:
        where = "" if source == "command line" else f"{source}: "
        raise UsageError(f"{where}{option.long} {error}") from None


def _shown(option: Option[Any], value: Any) -> str:
    if option is ENV:
        return " ".join(name for name, _ in value)  # the values may be secrets
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
