"""The value of every option, and its source: flags > environment > file > defaults.

`launcher.run_job` calls `resolve` once. Only the configuration file that was named is opened; every
mistake is a `UsageError` of one line. The file is flat YAML, read as nodes and not as YAML's own
types: each value is read like a word of the command line (to YAML 1.1 `1:4` is the number 64).

`render_help` is the text of `elasticrun --help`, made from the records of the options.
"""

import difflib
import functools
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from elastic_driver.errors import UsageError
from elastic_driver.options import Heading, is_secret
from elastic_driver.settings import Settings
from launcher.options import table
from launcher.options.table import (
    FOREIGN,
    IGNORED,
    NEEDLESS,
    OPTIONS,
    PET_OPTIONS,
    RDZV_CONF,
    LaunchOptions,
    Option,
)

T = TypeVar("T")
Words = tuple[str, ...]
Layer = dict[Option, tuple[Words, str]]  # option → its words and their source

_PREFIX = "ELASTICRUN_"
_NULL = "tag:yaml.org,2002:null"
_ALL = (*OPTIONS, *table.IGNORED)
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_SPELLING = {spelling: option for option in _ALL for spelling in (option.long, *option.aliases)}
_MODULE = ("-m", "--module")
_VARIABLE = re.compile(rf"((ELASTICRUN|PET)_[A-Z0-9_]+|{'|'.join(table.VARIABLES)})=")
_SHORT = sorted((s for s in _BY_SPELLING if not s.startswith("--")), key=len, reverse=True)


class Setting(NamedTuple):
    """The value of an option, and its source."""

    value: Any
    text: str  # the words that were given; for --env only the names of the variables
    source: str = "default"  # or `command line`, a variable, `FILE line N`
    level: int = 0  # of the source: 0 default, 1 file, 2 environment, 3 command line


@dataclass(frozen=True)
class CommandLine:
    """A command line: the options, the command to run (may be empty), and remarks.

    `line["min_np"]` is the value of an option, by the name of its field.
    """

    settings: Mapping[str, Setting]
    command: Words
    warnings: Words
    words: Words = ()  # the same in one spelling without --resume: NAME=VALUE … options -- command

    def __getitem__(self, field: str) -> Any:
        return self.settings[field].value

    @functools.cached_property
    def options(self) -> LaunchOptions:
        """The launcher's own options."""
        return self.fill(LaunchOptions)

    def level(self, field: str) -> int:
        """Return the level of the option's source: see `Setting`."""
        return self.settings[field].level

    def having(self, field: str, setting: Setting) -> "CommandLine":
        """Return this line with another value of one option."""
        return replace(self, settings={**self.settings, field: setting})

    def fill(self, struct: type[T], **decided: Any) -> T:
        """Return a struct with the values of its options; `decided` are the other fields.

        A field with the name of an option of `Settings` gets the same value.
        """
        known = {f.name for kind in (struct, Settings) for f in fields(kind) if f.metadata}  # type: ignore[arg-type]
        values = {f.name: self[f.name] for f in fields(struct) if f.name in known}  # type: ignore[arg-type]
        return struct(**{**values, **decided})

    def origins(self) -> tuple[tuple[str, str, str], ...]:
        """Return (option, words, source) of all options that were set, in the order of --help."""
        found = ((option.long, self.settings[option.field]) for option in OPTIONS)
        return tuple((long, s.text, s.source) for long, s in found if s.level)


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read argv (without the program's name), the environment and the configuration file.

    Raises:
        UsageError: an option is unknown, or a value cannot be read; names option and source.
    """
    given, command, remarks = split(argv)
    from_environment, warnings = _from_environment(environ)
    from_argv: Layer = {option: (words, "command line") for option, words in given.items()}
    config = _BY_NAME["config-file"]
    named = from_argv.get(config) or from_environment.get(config)
    from_file = {} if named is None else _from_file(Path(_read(config, *named).value))
    settings = {option.field: Setting(option.default, option.default_text) for option in OPTIONS}
    for level, layer in enumerate((from_file, from_environment, from_argv), start=1):
        for option, (words, source) in layer.items():
            settings[option.field] = _read(option, words, source)._replace(level=level)
    found = ((option.long, settings.pop(option.field, None)) for option in table.IGNORED)
    warnings.append(table.remark(tuple(long for long, given_as in found if given_as)))
    if (backend := settings["rdzv_backend"].value) not in (None, "c10d", "static"):
        own = "the job has its own rendezvous, and the HOST of --rdzv-endpoint is one of its nodes"
        warnings.append(f"--rdzv-backend {backend} is not used: {own}")
    same = _BY_NAME["resume"]  # with or without it, the job is the same
    given.pop(same, None)
    names = sorted({source for o, (_words, source) in from_environment.items() if o is not same})
    variables = (f"{name}={_kept(environ[name], from_environment, name)}" for name in names)
    words = (*variables, *_spelled(given, command))
    return CommandLine(settings, command, tuple(filter(None, (*remarks, *warnings))), words)


def resolve_again(words: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read the `words` of an earlier command line, with its variables in place of today's.

    Raises UsageError as `resolve` does.
    """
    first = next((n for n, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
    variables = dict(word.split("=", 1) for word in words[:first])
    others = {name: value for name, value in environ.items() if not _VARIABLE.match(f"{name}=")}
    return resolve(words[first:], {**others, **variables})


def _spelled(given: Mapping[Option, Words], command: Words) -> Words:
    """Return an argv with these options, in the order of --help, and this command."""
    argv: list[str] = []
    for option in (each for each in OPTIONS if each in given):
        words = given[option]
        if option.kind.private:
            words = _without_secrets(words)
        elif words and not option.kind.repeat:
            words = (",".join(words),)
        argv += [f"{option.long}={word}" for word in words] or [option.long]
    return (*argv, "--", *command) if command else tuple(argv)


def _kept(text: str, layer: Layer, name: str) -> str:
    """Return the text of a variable of ours as the journal keeps it."""
    found = next((o for o, (_words, source) in layer.items() if source == name), None)
    if found is None or not found.kind.private:
        return text
    words = layer[found][0]
    kept = _without_secrets(words)
    return text if kept == words else shlex.join(kept)


def _without_secrets(words: Words) -> Words:
    """Return `--env` without values named like secrets: they are in the shell that resumes."""
    named = (word.partition("=") for word in words)
    return tuple(n if equals and is_secret(n) else f"{n}{equals}{v}" for n, equals, v in named)


def split(argv: Sequence[str]) -> tuple[dict[Option, Words], Words, Words]:
    """Return the words of each option given; the command and its arguments; remarks."""
    given: dict[Option, Words] = {}
    remarks: list[str] = []
    rest = list(argv)
    module = []
    while rest and not _begins_command(rest):
        spelling, attached = table.translated(*_split_argument(rest.pop(0)))
        if spelling in _MODULE:
            module = ["-m"]
        elif spelling == "--rdzv-conf":
            text = attached if attached is not None else rest.pop(0) if rest else ""
            words, more = _rdzv_conf(text)
            rest[:0] = words
            remarks += more
        elif spelling in NEEDLESS:
            number, reason = NEEDLESS[spelling]
            del rest[: number if attached is None else 0]
            remarks.append(f"{spelling} is ignored: {reason}")
        elif spelling in _BY_SPELLING:
            option = _BY_SPELLING[spelling]
            taken = _take(option, spelling, attached, rest)
            given[option] = option.kind.added(given.get(option, ()), taken)
        elif spelling in FOREIGN:
            raise UsageError(f"{spelling} does not exist here; {FOREIGN[spelling]}")
        else:
            raise UsageError(f"unknown option {spelling}{_did_you_mean(spelling, _BY_SPELLING)}")
    if rest and rest[0] in ("--", "--module"):
        rest[:1] = [] if rest[0] == "--" else ["-m"]
    return given, (*module, *rest), tuple(remarks)


def _begins_command(rest: list[str]) -> bool:
    """Return whether the options are over. `-m module` is a command, as for python itself.

    torchrun also takes `-m` before other options.
    """
    if rest[0] in _MODULE:
        return not (rest[1:] and rest[1].startswith("-"))
    return not rest[0].startswith("-") or rest[0] in ("-", "--")


def _rdzv_conf(text: str) -> tuple[list[str], list[str]]:
    """Return the options that mean the same as torchrun's --rdzv-conf, and remarks."""
    words, others = [], []
    for pair in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise UsageError(f"--rdzv-conf needs KEY=VALUE,…, got {pair!r}")
        if key in RDZV_CONF:
            words.append(f"{RDZV_CONF[key]}={value}")
        else:
            others.append(key)
    advice = "use --start-timeout, --elastic-timeout, --last-call and --heartbeat-timeout"
    return words, [f"--rdzv-conf {', '.join(others)} is ignored: {advice}"] if others else []


def _split_argument(argument: str) -> tuple[str, str | None]:
    """Split `--min_np=2` into `--min-np` and `2`; `-H=a` and `-Ha` into `-H` and `a`."""
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name.replace("_", "-"), value if equals else None
    if argument not in _BY_SPELLING:
        for short in _SHORT:
            if argument.startswith(short) and _BY_SPELLING[short].kind.words == 1:
                return short, argument[len(short) :].removeprefix("=")
    return argument, None


def _take(option: Option, spelling: str, attached: str | None, rest: list[str]) -> Words:
    """Remove the option's words from the rest of argv and return them."""
    wanted = option.kind.words
    if attached is not None:
        return tuple(attached.replace(",", " ").split()) if wanted > 1 else (attached,)
    words = tuple(rest[:wanted])
    if len(words) < wanted or any(_split_argument(w)[0] in _BY_SPELLING for w in words):
        raise UsageError(f"{spelling} needs a value: {spelling} {option.kind.metavar}")
    del rest[:wanted]
    return words


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; see elasticrun --help"


def _from_environment(environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    by_variable = {
        "PET_" + s.removeprefix("--").replace("-", "_").upper(): _BY_SPELLING[s]
        for s in PET_OPTIONS
    } | {option.variable: option for option in OPTIONS}
    words, warnings = _rdzv_conf(environ.get(name := "PET_RDZV_CONF", ""))
    layer: Layer = {option: (value, name) for option, value in split(words)[0].items()}
    for name in filter(environ.get, table.VARIABLES):
        spelling, value = table.from_variable(name, environ[name])
        layer[_BY_SPELLING[spelling]] = ((value or "",), name)
    for name in sorted(environ, key=lambda name: (name.startswith(_PREFIX), name)):  # ours win
        if name in by_variable:
            option = by_variable[name]
            layer[option] = (_words(option, environ[name], name), name)
        elif name.startswith(_PREFIX):
            hint = _did_you_mean(name, by_variable)
            warnings.append(f"the environment variable {name} sets no option{hint}")
    return layer, warnings


def _words(option: Option, text: str, source: str) -> Words:
    """Split a text into words as the shell does, if the option takes several words."""
    if not option.kind.repeat and option.kind.words <= 1:
        return (text,)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{source}: {text!r}: {error}") from None


def _read(option: Option, words: Words, source: str) -> Setting:
    kind = option.kind
    text = " ".join(word.partition("=")[0] if kind.private else word for word in words)
    try:
        if not kind.repeat and not min(kind.words, 1) <= len(words) <= max(kind.words, 1):
            raise ValueError(f"needs {kind.metavar or 'true or false'}, got {text!r}")
        return Setting(kind.read(*words), text or "true", source)
    except ValueError as error:
        where = "" if source == "command line" else f"{source}: "
        raise UsageError(f"{where}{option.long} {error}") from None


# ---- the file ----------------------------------------------------------------------------


def _from_file(path: Path) -> Layer:
    layer: Layer = {}
    for key, value in _entries(path):
        source = f"{path} line {key.start_mark.line + 1}"
        name = _scalar(key, source)
        kind = name.replace("_", "-")
        if kind in table.SECTIONS and isinstance(value, yaml.MappingNode):
            _add_section(layer, kind, value, path)
        elif kind == "controller" and isinstance(value, yaml.ScalarNode):
            try:
                _add(layer, name, *table.from_controller(value.value), source)
            except ValueError as error:
                raise UsageError(f"{source}: {name!r} {error}") from None
        elif isinstance(value, yaml.ScalarNode):
            _add(layer, name, *table.translated(f"--{kind}", value.value), source)
        else:
            option = _option_of(f"--{kind}", name, source)
            if isinstance(value, yaml.SequenceNode):
                words = tuple(_scalar(item, source) for item in value.value)
            else:
                pairs = ((_scalar(k, source), _scalar(v, source)) for k, v in value.value)
                words = tuple(f"{k}={v}" for k, v in pairs)
            if len(words) > 1 and option.kind.words == 1 and not option.kind.repeat:
                words = (",".join(words),)  # a YAML list where the command line has commas
            _add_words(layer, name, option, words, source)
    return layer


def _add_section(layer: Layer, section: str, node: yaml.MappingNode, path: Path) -> None:
    """Add a section of horovodrun's configuration file; empty values change nothing."""
    for key, value in node.value:
        source = f"{path} line {key.start_mark.line + 1}"
        name = _scalar(key, source)
        text = _scalar(value, source)
        if value.tag == _NULL:
            continue
        found = table.from_section(section, name.replace("_", "-"), text)
        if found is not None:
            _add(layer, name, *found, source)


def _add(layer: Layer, name: str, spelling: str, text: str | None, source: str) -> None:
    option = _option_of(spelling, name, source)
    words = ("true",) if text is None else _words(option, text, source)
    _add_words(layer, name, option, words, source)


def _add_words(layer: Layer, name: str, option: Option, words: Words, source: str) -> None:
    if option in layer:
        raise UsageError(f"{source}: {name!r} is given twice; keep one of them")
    layer[option] = (words, source)


def _option_of(spelling: str, name: str, source: str) -> Option:
    option = _BY_SPELLING.get(spelling)
    if option is None or option.long != spelling:
        raise UsageError(f"{source}: {name!r} is not an option{_did_you_mean(name, _BY_NAME)}")
    return option


def _entries(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a file; raises UsageError if it is not a flat mapping."""
    try:
        root = yaml.compose(path.read_bytes().decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    except ValueError:  # an empty byte, or what is no text
        raise UsageError(f"{str(path)!r} cannot be the name of a configuration file") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply; expected lines such as 'min-np: 2'") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{path}{line}: not YAML: {problem}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: expected lines such as 'min-np: 2'")
    return root.value if root else []


def _scalar(node: yaml.Node, source: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{source}: expected a plain value, found a nested one")
    return str(node.value)


# ---- the help ----------------------------------------------------------------------------

_PAD = " " * 6

HEAD = """\
usage: elasticrun [OPTIONS] [--] COMMAND [ARGS…]

Runs COMMAND as several workers that train together, and keeps the job going when workers fail
and hosts come and go. COMMAND is script.py, -m module, python script.py or any program;
everything after it belongs to it. Every option may also be given as a variable (--min-np as
ELASTICRUN_MIN_NP) or in a file (--config-file). Underscores in names are as good as hyphens.
"""

TAIL = """\
Examples
  Two workers on this machine:
      elasticrun -np 2 train.py --epochs 10
  Start with four, never train with fewer than two:
      elasticrun -np 4 --min-np 2 train.py
  What torchrun calls one node with as many workers as it has GPUs:
      elasticrun --standalone --nproc-per-node auto train.py
  Hosts that come and go:
      elasticrun --host-discovery-script ./discover_hosts.sh --min-np 1 --max-np 8 train.py
  See what would happen, and which file or variable says so:
      elasticrun -v --dry-run --config-file job.yaml train.py

Exit status
  0 success; the failing worker's own status, or 128+N for its signal, when training failed;
  64 wrong usage; 65 the ranks held different states; 70 a bug of elasticrun; 75 not enough hosts,
  or not in time; 130/143 interrupted.
"""


def render_help(width: int = 100) -> str:
    """Return the whole text, wrapped to `width` columns."""
    parts = [HEAD]
    for heading in Heading:
        entries = [_entry(option, width) for option in OPTIONS if option.heading is heading]
        if heading is Heading.HOROVOD:
            entries.append(_ignored(width))
        parts.append("\n".join([heading.value, *entries]) + "\n")
    return "\n".join([*parts, TAIL])


def _ignored(width: int) -> str:
    """Return the options of horovodrun that are taken and change nothing."""
    text = f"Taken and ignored: {', '.join(option.long for option in IGNORED)}."
    lines = textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent=_PAD, break_on_hyphens=False
    )
    return "\n".join(lines)


def _entry(option: Option, width: int) -> str:
    head = f"  {', '.join(option.spellings)} {option.kind.metavar}".rstrip()
    default = option.default_text
    text = f"{option.help} [{default}]" if default else option.help
    lines = textwrap.wrap(text, width, initial_indent=_PAD, subsequent_indent=_PAD)
    return "\n".join([head, *lines])
