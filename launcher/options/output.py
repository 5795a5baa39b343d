"""Options that say where the workers' output and elasticrun's own lines go."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import OUTPUT, Option

LOG_DIR: Option[str | None] = Option(
    "log-dir",
    kinds.text("DIR"),
    None,
    OUTPUT,
    "Also write each worker's output to files below DIR.",
    aliases=("--output-filename",),
)
TEE: Option[str] = Option(
    "tee",
    kinds.streams(),
    "3",
    OUTPUT,
    "With --log-dir: streams that go both to the terminal and to files.",
    aliases=("-t",),
)
REDIRECTS: Option[str] = Option(
    "redirects",
    kinds.streams(),
    "0",
    OUTPUT,
    "With --log-dir: streams that go to files only. 0 none, 1 stdout, 2 stderr, 3 both; per local "
    "rank as 0:3,1:1.",
    aliases=("-r",),
)
LOCAL_RANKS_FILTER: Option[tuple[int, ...] | None] = Option(
    "local-ranks-filter",
    kinds.numbers("0,1"),
    None,
    OUTPUT,
    "Show only these local ranks of each host on the terminal.",
)
PREFIX_OUTPUT_WITH_TIMESTAMP: Option[bool] = Option(
    "prefix-output-with-timestamp",
    kinds.flag(),
    False,
    OUTPUT,
    "Put the time in front of every line of the workers.",
    aliases=("--prefix-timestamp",),
)
LOG_FORMAT: Option[str] = Option(
    "log-format",
    kinds.choice("text", "json"),
    "text",
    OUTPUT,
    "Form of elasticrun's own lines on stderr.",
)
VERBOSE: Option[bool] = Option(
    "verbose", kinds.flag(), False, OUTPUT, "Say more; with --dry-run: where each value came from.",
    aliases=("-v",),
)  # fmt: skip
QUIET: Option[bool] = Option(
    "quiet", kinds.flag(), False, OUTPUT, "Say only what failed.", aliases=("-q",)
)
