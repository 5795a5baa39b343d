"""Run a plan of faults against a job that trains, and judge it (`benchmarks/chaos.py`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from random import Random

import msgspec

from tests.chaos.faults import FAULTS, Arena, in_own_mounts, small_disk
from tests.chaos.hosts import HOST_FAULTS, on_hosts
from tests.chaos.plan import Plan, read_plan
from tests.chaos.trial import Trial
from tests.support.cluster import why_not
from tests.support.job import JOBS, elasticrun

CANNOT = 75


def on_this_machine(plan: Plan, stack: contextlib.ExitStack) -> Trial:
    """A job of two agents here, its folder on a small disk if the plan fills it."""
    state_dir = None
    if "full_disk" in plan.faults:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic-chaos-"))
        state_dir = Path(folder)
        stack.enter_context(small_disk(state_dir))
    half = plan.workers // 2
    hosts = f"localhost:{plan.workers - half},127.0.0.2:{half}"
    args = ("-H", hosts, "--min-np", "1", "--max-restarts", "1000000", "--debug")
    cooldown = ("--blacklist-cooldown-range", "0.1", "0.2")
    env = {"STEPS": "100000000", "STEP_MS": str(plan.step_ms)}
    train = ("--", str(JOBS / "train.py"))
    job = stack.enter_context(elasticrun(*args, *cooldown, *train, env=env, state_dir=state_dir))
    return Trial(plan, Arena(job, Random(plan.seed), plan.held), FAULTS)


def main() -> int:
    """Run the plan; return 1 if an objective was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True, help="a YAML file")
    parser.add_argument("--seed", type=int, help="in place of the plan's")
    parser.add_argument("--seconds", type=float, help="in place of the plan's")
    parser.add_argument("--report", type=Path, help="also write the report there, as JSON")
    args = parser.parse_args()
    try:
        plan = read_plan(args.plan)
    except (OSError, ValueError) as error:
        parser.error(f"{args.plan}: {error}")
    known = HOST_FAULTS if plan.hosts else FAULTS
    if unknown := set(plan.faults) - set(known):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if reason := why_not() if plan.hosts else None:
        print(f"cannot be tried here: {reason}", file=sys.stderr)
        return CANNOT
    changed = {"seed": args.seed, "seconds": args.seconds}
    plan = msgspec.structs.replace(plan, **{k: v for k, v in changed.items() if v is not None})
    if "full_disk" in plan.faults:
        in_own_mounts()
    with contextlib.ExitStack() as stack:
        trial = on_hosts(plan, stack) if plan.hosts else on_this_machine(plan, stack)
        print(f"seed {plan.seed}", flush=True)
        try:
            trial.run()
            trial.end()
        except (AssertionError, KeyboardInterrupt) as error:
            trial.arena.broken.append(str(error) or "it was interrupted")
        report, missed = trial.report(), trial.missed()
    text = json.dumps({**report, "missed": missed}, indent=1)
    print(text)
    if args.report is not None:
        args.report.write_text(text + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
