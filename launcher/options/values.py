"""The value of every option, and its source: flags > environment > file > defaults.

`launcher.job` calls `resolve` once. Only the configuration file that was named is opened; every
mistake is a `UsageError` of one line. The file is flat YAML, read as nodes and not as YAML's own
types: each value is read like a word of the command line (to YAML 1.1 `1:4` is the number 64).
"""

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from elastic_driver.errors import UsageError
from launcher.options.kinds import Words
from launcher.options.record import Option
from launcher.options.table import CONFIG_FILE, ENV, FOREIGN, NEEDLESS, OPTIONS, PET_OPTIONS

T = TypeVar("T")

Layer = dict[Option[Any], tuple[Words, str]]  # option → its words, and where they stand

_PREFIX = "ELASTICRUN_"
MAX_BYTES = 1 << 20  # of a configuration file


@dataclass(frozen=True)
class Setting:
    """A value and where it came from (`command line`, a variable, `file line n`, `default`)."""

    value: Any
    source: str
    level: int = 0  # 0 default, 1 file, 2 environment, 3 command line


class OptionValues:
    """The value of every option: `values[MIN_NP]`; `source(MIN_NP)` says who set it."""

    def __init__(self, settings: Mapping[Option[Any], Setting]) -> None:
        self._settings = dict(settings)

    def __getitem__(self, option: Option[T]) -> T:
        return cast("T", self._settings[option].value)

    def fields(self, struct: str) -> dict[str, Any]:
        """Return the fields of `struct` (such as "settings") that options fill, by name."""
        return {
            path.partition(".")[2]: self[option]
            for option in OPTIONS
            for path in option.fills
            if path.startswith(f"{struct}.")
        }

    def source(self, option: Option[Any]) -> str:
        """Return the source of the option's value."""
        return self._settings[option].source

    def level(self, option: Option[Any]) -> int:
        """Return the rank of its source: 0 default, 1 file, 2 environment, 3 command line."""
        return self._settings[option].level

    def replaced(self, option: Option[T], setting: Setting) -> "OptionValues":
        """Return these values with one replaced."""
        return OptionValues({**self._settings, option: setting})

    def origins(self) -> tuple[tuple[str, str, str], ...]:
        """Return (option, value, source) of all that were set, in the order of the table."""
        return tuple(
            (option.long, _shown(option, self[option]), self.source(option))
            for option in OPTIONS
            if self.level(option)
        )


@dataclass(frozen=True)
class CommandLine:
    """A command line: the options, the command to run (may be empty), and remarks."""

    values: OptionValues
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
    return CommandLine(OptionValues(settings), command, (*remarks, *warnings))


# ---- argv --------------------------------------------------------------------------------

_BY_SPELLING: dict[str, Option[Any]] = {
    spelling: option for option in OPTIONS for spelling in (option.long, *option.aliases)
}
_SHORT = sorted((s for s in _BY_SPELLING if not s.startswith("--")), key=len, reverse=True)


def split(argv: Sequence[str]) -> tuple[dict[Option[Any], Words], tuple[str, ...], tuple[str, ...]]:
    """Return the words of each option given; the command and its arguments; remarks."""
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
            remarks.append(f"{spelling} is ignored: {reason}")
            continue
        option = _find(spelling)
        taken = _take(option, spelling, attached, rest)
        given[option] = given.get(option, ()) + taken if option.kind.repeat else taken
    return given, (), tuple(remarks)


def _split_argument(argument: str) -> tuple[str, str | None]:
    """Split `--min_np=2` into `--min-np` and `2`; `-H=a` and `-Ha` into `-H` and `a`."""
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
    """Remove the option's words from the rest of argv and return them."""
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


def _from_file(path: Path, entries: Sequence["FileEntry"]) -> Layer:
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
    """Return a text as the words it would be on the command line."""
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


# ---- the file ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FileEntry:
    """One line of the file: `text` for a scalar; `words` for a list or a mapping."""

    key: str
    line: int
    text: str
    words: tuple[str, ...] | None


def read_config(path: Path) -> list[FileEntry]:
    """Return the entries of a file, in its order.

    Raises:
        UsageError: the file cannot be read or is not a flat mapping; names file and line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES} bytes; is this a configuration?")
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{path}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())  # some of them take several lines
        raise UsageError(f"{path}: not YAML: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: expected lines such as 'min-np: 2'")
    return [_entry(path, key, value) for key, value in root.value]


def _entry(path: Path, key: yaml.Node, value: yaml.Node) -> FileEntry:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise UsageError(f"{path} line {line}: expected the name of an option")
    if isinstance(value, yaml.ScalarNode):
        return FileEntry(key.value, line, value.value, None)
    if isinstance(value, yaml.SequenceNode):
        words = tuple(_scalar(path, item) for item in value.value)
    else:
        words = tuple(f"{_scalar(path, k)}={_scalar(path, v)}" for k, v in value.value)
    return FileEntry(key.value, line, "", words)


def _scalar(path: Path, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        where = f"{path} line {node.start_mark.line + 1}"
        raise UsageError(f"{where}: expected a plain value, found a nested one")
    return str(node.value)
