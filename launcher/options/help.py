"""The text of `elasticrun --help`, drawn from the table of options."""

import textwrap
from typing import Any

from launcher.options.record import Option
from launcher.options.table import GROUPS, OPTIONS

_INDENT = 6

_HEAD = """\
usage: elasticrun [OPTIONS] [--] COMMAND [ARGS…]

Runs COMMAND as several workers that train together, and keeps the job going when workers fail
and hosts come and go. COMMAND is script.py, -m module, python script.py or any program;
everything after it belongs to it. Every option may also be given as a variable (--min-np as
ELASTICRUN_MIN_NP) or in a file (--config-file). Underscores in names are as good as hyphens.
"""

_TAIL = """\
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
  64 wrong usage; 70 a bug of ours; 75 not enough hosts, or started too late; 130/143 interrupted.
"""


def render_help(width: int = 100) -> str:
    """Return the whole text, wrapped to `width` columns."""
    parts = [_HEAD]
    for group in GROUPS:
        members = [option for option in OPTIONS if option.group == group]
        parts.append("\n".join([group, *(_entry(option, width) for option in members)]) + "\n")
    return "\n".join([*parts, _TAIL])


def _entry(option: Option[Any], width: int) -> str:
    short = [alias for alias in option.aliases if not alias.startswith("--")]
    others = [alias for alias in option.aliases if alias.startswith("--")]
    spellings = ", ".join((*short, option.long, *others))
    head = f"  {spellings} {option.kind.metavar}".rstrip()
    default = _default(option)
    text = f"{option.help} [{default}]" if default else option.help
    pad = " " * _INDENT
    return "\n".join([head, *textwrap.wrap(text, width, initial_indent=pad, subsequent_indent=pad)])


def _default(option: Option[Any]) -> str:
    if option.shown:
        return option.shown
    value = option.default
    if value is None or isinstance(value, bool) or value == ():
        return ""
    if isinstance(value, tuple):
        return " ".join(str(v) if isinstance(v, str) else f"{v:g}" for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
