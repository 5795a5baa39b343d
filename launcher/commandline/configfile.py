"""Options from a YAML file: a flat mapping of long option names to values.

Values are kept as the text that stands in the file and read like words of the command line.
YAML's own types are left out on purpose: to YAML 1.1 `nnodes: 1:4` is the number 64 and
`run-id: 1e3` a float. Called by `values`; knows nothing of the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from elastic_driver.errors import UsageError

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """One line of the file: `text` for a scalar; `words` for a list or a mapping."""

    key: str
    line: int
    text: str
    words: tuple[str, ...] | None


def read_config(path: Path) -> list[FileEntry]:
    """The entries of a file, in its order.

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
