"""Options that name the run, place its files, and show things instead of running."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import OTHER, STATE, Option

RUN_ID: Option[str | None] = Option(
    "run-id",
    kinds.text("ID"),
    None,
    STATE,
    "The job's name, in logs and in the state directory.",
    aliases=("--rdzv-id",),
    shown="time and a random suffix",
)
STATE_DIR: Option[str | None] = Option(
    "state-dir",
    kinds.text("DIR"),
    None,
    STATE,
    "Where the event log of each run lies, DIR/ID/events.jsonl.",
    shown="~/.local/state/elastic-driver",
)

CONFIG_FILE: Option[str | None] = Option(
    "config-file",
    kinds.text("FILE.yaml"),
    None,
    OTHER,
    "Options from a YAML file, 'min-np: 2' a line. Flags win over ELASTICRUN_<OPTION> variables, "
    "those over the file, the file over defaults.",
)
DRY_RUN: Option[bool] = Option(
    "dry-run", kinds.flag(), False, OTHER, "Check everything, show the plan, start nothing."
)
DEBUG: Option[bool] = Option(
    "debug", kinds.flag(), False, OTHER, "Check the driver's own invariants after every event."
)
CHECK_BUILD: Option[bool] = Option(
    "check-build", kinds.flag(), False, OTHER, "Show what this installation can do."
)
VERSION: Option[bool] = Option("version", kinds.flag(), False, OTHER, "Show the version.")
HELP: Option[bool] = Option("help", kinds.flag(), False, OTHER, "Show this.", aliases=("-h",))
