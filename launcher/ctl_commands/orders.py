"""Orders of a user to a running job: what they would cost, and what they say.

`of_drain` and `of_scale` say what an order would cost the job, and `confirm` asks the user. The
file of `elasticctl apply` is a plan in YAML, which `read_plan` reads. `ask_stacks` and
`stacks_after` get the stacks of all workers.
"""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import UsageError
from elastic_driver.runtime.status_document import JobDocument
from elastic_driver.words import counted
from elastic_driver.words.wire_events import PlanApplied
from launcher.ctl_commands import job_text
from rendezvous.client import RendezvousClient

# ---- what an order costs ------------------------------------------------------------------


def cost_of_drain(job: JobDocument, host: str) -> str | None:
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


def cost_of_scale(job: JobDocument, workers: int) -> str | None:
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


# ---- plan files ---------------------------------------------------------------------------


MAX_BYTES = 65536
_FIELDS = ", ".join(PlanApplied.__struct_fields__)
_LEAST_BYTES = 2**20  # of a worker; less is a size without its unit
_AT = re.compile(r"^Expected (.*) - at `\$\.(\w+)`$")  # how msgspec says where
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)


def read_plan(path: Path, newest: int) -> PlanApplied:
    """Return the plan in a file; without a `number` it is the next one after `newest`.

    Raises UsageError, in one line, for a file that cannot be read or is no plan.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        return parse_plan(text, newest)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        why = _AT.sub(r"\2: expected \1", " ".join(str(error).split()))
        raise UsageError(f"{path} is no plan: {why}") from error


def parse_plan(text: bytes, newest: int) -> PlanApplied:
    """Return the plan that a file says; raises ValueError, or what YAML raises, for none."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    said = [(_name_of(key), value) for key, value in pairs]
    for name, _ in said:
        if name not in PlanApplied.__struct_fields__:
            raise ValueError(f"{name!r} is none of {_FIELDS}")
        if [each for each, _ in said].count(name) > 1:
            raise ValueError(f"{name} appears twice")
    plan = {name: _read(value) for name, value in said}
    if all(plan[name] is None for name in plan if name != "number"):
        raise ValueError(f"it needs some of {_FIELDS.removeprefix('number, ')}, each with a value")
    size = plan.get("memory_per_worker")
    if isinstance(size, str):
        size = plan["memory_per_worker"] = parse_bytes(size)
    if isinstance(size, int) and 0 < size < _LEAST_BYTES:
        raise ValueError(f"{size} bytes for a worker are too few; add a unit, as {size}GiB")
    return msgspec.convert({"number": newest + 1, **plan}, PlanApplied)


def _name_of(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):
        raise ValueError("one of its names is a list or a mapping")
    return str(key.value).replace("-", "_")[:40]


def _read(node: yaml.Node) -> Any:
    """Return the value that a node says, of the types that a plan has."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 512MiB, 8G (10⁹) or 1.5 TiB; raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a size is a number and a unit, as 8GiB, not {text[:40]!r}")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()])


# ---- stacks -------------------------------------------------------------------------------


class _EventPage(msgspec.Struct):
    events: list[msgspec.Raw]


def read_events(job: RendezvousClient, since: int = 0) -> list[bytes]:
    """Return the events after this number that the driver still has in memory, as JSON."""
    page = job.get_bytes(f"{EVENTS_PATH}?since={since}")
    return [bytes(line) for line in msgspec.json.decode(page, type=_EventPage).events]


def ask_stacks(job: RendezvousClient, who: str) -> int:
    """Ask all workers for their stacks; return the number of the last event before that."""
    known = read_events(job)
    body = msgspec.json.encode({"reason": f"asked for by {who}"})
    job.post_json(contract.STACKS_PATH, body)
    return job_text.read_event(known[-1]).n if known else 0


def stacks_after(job: RendezvousClient, number: int) -> str | None:
    """Return the stacks that were collected after this event; None: not yet."""
    for line in read_events(job, number):
        event = job_text.read_event(line)
        if event.event == job_text.STACKS_COLLECTED:
            return job_text.stacks(event)
    return None
