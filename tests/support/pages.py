"""Reads the commands of a page of the documentation.

A fenced block of the language `console` is typed into a terminal: lines that begin with `$ ` are
commands (`> ` continues one), all others what they print. A block of the language `sh` lists
commands. A remark, an HTML comment in the line before the block, says what no reader needs to know:

- `terminal: NAME`: the block runs in a terminal of its own, beside the blocks that follow;
- `exit: N`: its last command ends with status N;
- `keys: TEXT`: it needs a real terminal; these keys end it;
- `tested by: FILE`: it is not run here, but by this test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"(?P<remarks>(?:^ *<!--[^\n]*-->\n)*)^ *```(?P<language>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_REMARK = re.compile(r"<!-- ([a-z ]+): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return where it stands, as editors take it."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Return the commands, with the lines that continue them."""
        if self.language == "sh":
            return _joined(self.text)
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif line.startswith("> ") and found:
                found[-1] += "\n" + line[2:]
        return found


def blocks_of(page: Path, root: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page=str(page.relative_to(root)),
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"].strip(),
            text=found["text"],
            remarks=dict(_REMARK.findall(found["remarks"])),
        )
        for found in _BLOCK.finditer(text)
    ]


def _joined(text: str) -> list[str]:
    """Return the commands of a list: a line each, longer where it ends with a backslash."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
