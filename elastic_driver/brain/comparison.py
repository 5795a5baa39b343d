"""What a replay of recorded jobs shows: two algorithms against what happened. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from elastic_driver.brain.algorithm import HostView
from elastic_driver.brain.replay import Outcome, Played, Recorded, best_possible
from elastic_driver.words import aligned, counted

_MARK = "*"


def comparison(
    jobs: Sequence[Recorded],
    left_out: Sequence[str],
    hosts: Sequence[HostView],
    outcomes: Mapping[str, Outcome],
) -> str:
    """Return the tables for jobs in the order of their beginnings, and outcomes by algorithm."""
    slots = sum(host.slots for host in hosts)
    best = [best_possible(job, slots) for job in jobs]
    names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    head = ["job", "counted in", "recorded", "best possible", *outcomes]
    rows = [
        [
            job.name,
            "batches" if job.samples is None else "samples",
            _amount(job, job.trained),
            _amount(job, most),
            *(_played(job, outcome.jobs[number]) for outcome in outcomes.values()),
        ]
        for number, (job, most) in enumerate(zip(jobs, best, strict=True))
    ]
    what = f"{counted(len(jobs), 'job')} on {counted(slots, 'slot')}"
    lines = [f"{what} ({names})", "", *aligned([head, *rows], right=range(2, len(head))), ""]
    for name, outcome in outcomes.items():
        lines += _summary(name, jobs, best, outcome)
    if any(job.extrapolated for outcome in outcomes.values() for job in outcome.jobs):
        lines += ["", f"{_MARK}: was at sizes that were not measured; their speed is extrapolated"]
    if left_out:
        lines += ["", f"left out, not measured or not ended: {', '.join(left_out)}"]
    return "\n".join(lines) + "\n"


def _summary(
    name: str, jobs: Sequence[Recorded], best: Sequence[float], outcome: Outcome
) -> list[str]:
    changes = sum(job.changes for job in outcome.jobs)
    of_recorded = _share(outcome.jobs, [job.trained for job in jobs])
    lines = [
        f"{name}: {of_recorded} of recorded, {_share(outcome.jobs, best)} of best possible "
        f"(means of the jobs); changes: {changes}"
    ]
    for job in outcome.jobs:
        if job.extrapolated:
            sizes = ", ".join(f"{size} on {hosts}" for size, hosts in job.extrapolated)
            lines.append(f"  {job.name}: extrapolated sizes (workers on hosts): {sizes}")
    if outcome.refused:
        lines.append(f"  plans refused: {len(outcome.refused)}, the first: {outcome.refused[0]}")
    return lines


def _share(jobs: Iterable[Played], against: Iterable[float]) -> str:
    shares = [job.trained / each for job, each in zip(jobs, against, strict=True) if each]
    return f"{fmean(shares):.1%}" if shares else "?"


def _amount(job: Recorded, batches: float) -> str:
    return f"{batches * (1.0 if job.samples is None else job.samples):.0f}"


def _played(job: Recorded, played: Played) -> str:
    return _amount(job, played.trained) + (_MARK if played.extrapolated else "")
