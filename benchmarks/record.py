"""Records a command as an SVG of the terminal, in which each line appears when it was written.

    python -m benchmarks.record docs/demo.svg make -s demo

The command runs on a pseudo-terminal of 104 columns. Pauses longer than a second are shown as one
second. The SVG needs no network, font or script; where there is no animation it shows all lines.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 104
LONGEST_PAUSE_S = 1.0
STYLES = {"^elasticrun:.*": "cyan", "^>>> .*": "bold red", "^ +(?=[a-z])[a-z ]+  .*": "green"}
# As rich's own, without its fonts from a server and the its comment.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold }}
{styles}
@media (prefers-reduced-motion: no-preference) {{ .line {{ animation: line 0s both }} }}
@keyframes line {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

Line = tuple[float, str]  # seconds since the start, and what was written


def run(command: list[str]) -> tuple[list[Line], int]:
    """Run the command on a terminal; return its lines and its exit status."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    began, written, lines = time.monotonic(), b"", []
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # EIO: the command has ended
                break
            written += read
            *whole, written = written.split(b"\n")
            now = time.monotonic() - began
            lines += [(now, line.decode(errors="replace").rstrip("\r")) for line in whole]
    os.close(ours)
    return lines, process.returncode


def draw(lines: list[Line], title: str) -> str:
    """Return the SVG of these lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    shown_at: list[float] = []
    at = last = 0.0
    for written_at, text in lines:
        at, last = at + min(written_at - last, LONGEST_PAUSE_S), written_at
        line = Text.from_ansi(text)
        for pattern, style in STYLES.items():
            line.highlight_regex(pattern, style)
        wrapped = line.wrap(console, COLUMNS)
        for part in wrapped or [Text()]:
            console.print(part, no_wrap=True, highlight=False)
            shown_at.append(at)
    svg = console.export_svg(title=title, code_format=FORMAT, unique_id="t")

    def delayed(found: re.Match[str]) -> str:
        return (
            f'<text class="line {found[1]}" style="animation-delay:{shown_at[int(found[2])]:.2f}s"'
        )

    return re.sub(r'<text class="(t-r\d+)"(?=[^>]*clip-path="url\(#t-line-(\d+)\)")', delayed, svg)


def main() -> int:
    if len(sys.argv) < 3:
        print("usage: python -m benchmarks.record FILE.svg COMMAND [ARGS…]", file=sys.stderr)
        return 64
    lines, status = run(sys.argv[2:])
    title = " ".join(word for word in sys.argv[2:] if not word.startswith("-"))
    Path(sys.argv[1]).write_text(draw(lines, title))
    return status


if __name__ == "__main__":
    sys.exit(main())
