"""The pages for users of torchrun and horovodrun name every flag, and what becomes of it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher.options.given import resolve
from tests.launcher.options.test_torchrun import VALUES as TORCHRUNS_VALUES
from tests.launcher.options.test_torchrun import torchruns_flags
from tests.support.job import ROOT


def value_of(action: argparse.Action) -> str:
    """Return a value for an option of torchrun."""
    flag = action.option_strings[0]
    if flag == "--rdzv-conf":
        return "timeout=30"
    return TORCHRUNS_VALUES.get(flag, str((action.choices or ["1"])[0]))  # type: ignore[index]


# The options of horovodrun 0.28.1, each with a value if it takes one.
HOROVODRUN = """
-np 2, --num-proc 2, --min-np 1, --min-num-proc 1, --max-np 4, --max-num-proc 4, --slots-per-host 2
-H a:2, --hosts a:2, --hostfile hosts, -hostfile hosts, --host-discovery-script ./hosts.sh
-p 22, --ssh-port 22, -i key, --ssh-identity-file key
--network-interfaces eth0, --network-interface eth0
--start-timeout 30, --elastic-timeout 600, --reset-limit 3, --blacklist-cooldown-range 60 300
--output-filename logs, --prefix-output-with-timestamp, -prefix-timestamp, --verbose, -v, --version
--check-build, -cb, --config-file job.yaml, --disable-cache, --gloo, --mpi, --jsrun
--mpi-args=--quiet, --tcp, --binding-args=-b, --mpi-threads-disable, --no-mpi-threads-disable
--fusion-threshold-mb 64, --cycle-time-ms 1, --cache-capacity 1024
--hierarchical-allreduce, --no-hierarchical-allreduce, --hierarchical-allgather
--no-hierarchical-allgather, --torus-allreduce, --no-torus-allreduce
--autotune, --no-autotune, --autotune-log-file tune.csv, --autotune-warmup-samples 3
--autotune-steps-per-sample 10, --autotune-bayes-opt-max-samples 20
--autotune-gaussian-process-noise 0.8
--timeline-filename time.json, --timeline-mark-cycles, --no-timeline-mark-cycles
--no-stall-check, --stall-check, --stall-check-warning-time-seconds 60
--stall-check-shutdown-time-seconds 0, --num-nccl-streams 1, --thread-affinity 0
--gloo-timeout-seconds 30, --log-level INFO, --log-with-timestamp, --log-without-timestamp
--log-hide-timestamp, --no-log-hide-timestamp
"""
HOROVODRUNS = {
    words[0].partition("=")[0]: words
    for words in (option.split() for option in re.split(r",\s|\n", HOROVODRUN.strip()))
}
TORCHRUNS = {  # without the second spelling of each, with underscores
    flag: [flag] if action.nargs == 0 else [flag, value_of(action)]
    for action in torchruns_flags()
    for flag in action.option_strings
    if "_" not in flag
}


def rows(page: str) -> dict[str, str]:
    """Return what the page's table says of each flag."""
    text = (ROOT / "docs" / page).read_text()
    found: dict[str, str] = {}
    for flags, here in re.findall(r"^\| (`-[^|]*) \| ([^|]*) \|", text, re.MULTILINE):
        for flag in re.findall(r"`([^`]+)`", flags):
            assert flag not in found, f"{flag} stands there twice"
            found[flag] = here
    return found


def outcome(words: list[str], folder: Path) -> str:
    """Return what `elasticrun` makes of an option: the same, ignored, or refused."""
    (folder / "job.yaml").write_text("min-np: 1\n")
    filled = [str(folder / word) if word == "job.yaml" else word for word in words]
    try:
        line = resolve([*filled, "train.py"], {})
    except UsageError:
        return "refused"
    ignored = any(" is ignored" in said for said in line.warnings)
    return "ignored" if ignored else "the same"


@pytest.mark.parametrize(
    ("page", "options"), [("from-torchrun.md", TORCHRUNS), ("from-horovod.md", HOROVODRUNS)]
)
def test_the_page_names_every_flag_and_what_becomes_of_it(
    page: str, options: dict[str, list[str]], tmp_path: Path
) -> None:
    assert rows(page) == {flag: outcome(words, tmp_path) for flag, words in options.items()}
