"""Says what an order would cost the job before `elasticctl` gives it. Pure but for `confirm`."""

import sys

from elastic_driver.errors import UsageError
from elastic_driver.runtime.status_document import JobDocument
from elastic_driver.words import counted


def of_drain(job: JobDocument, host: str) -> str | None:
    """Return what draining a host means if the others cannot carry the job; None: they can."""
    others = [h for h in job.hosts if h.host != host and h.state == "usable"]
    left = sum(h.slots for h in others)
    if host not in {h.host for h in job.hosts} or left >= job.min_np:
        return None
    if left:
        slots = counted(left, "slot is", "slots are")
        rest = f"without {host} {slots} left, fewer than the {job.min_np} of --min-np"
        also = ""
    else:
        rest = f"{host} is the last usable host of the job"
        also = "; without a checkpoint_dir its state is lost then (docs/checkpoints.md)"
    return (
        f"{rest}: it will wait for other hosts, and end with status 75 if none come in time{also}"
    )


def of_scale(job: JobDocument, workers: int) -> str | None:
    """Return what asking for workers means if there are not enough slots; None: there are."""
    slots = sum(h.slots for h in job.hosts if h.state == "usable")
    if workers <= slots:
        return None
    return (
        f"usable hosts have {counted(slots, 'slot')} now, fewer than {workers}: the job will train "
        "on as many workers as there are slots, and grow when hosts come"
    )


def confirm(warning: str | None, *, yes: bool) -> None:
    """Ask whether to go on, on a terminal; elsewhere say it and go on. `yes`: only say it.

    Raises UsageError if the answer is not yes.
    """
    if warning is None:
        return
    print(f"elasticctl: {warning}", file=sys.stderr, flush=True)
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was changed")
