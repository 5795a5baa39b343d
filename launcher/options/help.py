"""The text of `elasticrun --help`, made from the records of the options."""

import textwrap

from elastic_driver.options import Heading
from launcher.options.table import IGNORED, OPTIONS, Option

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
