"""Golden conversations with the job: events in, decisions out, readable by a person.

A file holds a title, the settings, and then for each event a line that begins with `>`, the time
and the event, followed by what the job decided. `python -m tests.job.conversation FILE…` reads
the events and writes the decisions anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Union

import msgspec

from elastic_driver.job.decisions import Announce, Decision, GiveOrder, PublishSave, PublishWorld
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import kinds, stamped
from elastic_driver.settings import Settings
from elastic_driver.words import orders as msg
from elastic_driver.words.wire_events import Event

FOLDER = Path(__file__).parent / "conversations"
_FIELD = re.compile(r" (?=\w+=)")


def replay(text: str) -> str:
    """The conversation with the decisions that a new job takes upon its events."""
    job, lines, number = None, [], 0
    for line in text.splitlines():
        if line.startswith("settings"):
            job = Job(Settings(**_fields(line)))
        if not line.startswith((">", "  ")):
            lines.append(line)
        if line.startswith("> "):
            assert job is not None, "the settings come first"
            number += 1
            when, event = parse(line)
            decided = stamped(job.handle(event, when), number)
            assert job.check() == [], line
            assert all(decision.cause == number for decision in decided)
            lines += [line, *(f"  {render(decision)}" for decision in decided)]
    return "\n".join(lines) + "\n"


def parse(line: str) -> tuple[float, Event]:
    """The time and the event of a line that begins with `>`."""
    _, when, rest = line.split(" ", 2)
    kind = rest.split(" ", 1)[0]
    return float(when), msgspec.convert({"type": kind, **_fields(rest)}, Union[kinds(Event)])  # noqa: UP007


def written(when: float, event: Event) -> str:
    """The line of an event; `parse` reads it."""
    fields = msgspec.to_builtins(event)
    kind = fields.pop("type")
    return " ".join([f"> {when:.3f}", kind, *(f"{k}={_value(v)}" for k, v in fields.items())])


def render(decision: Decision) -> str:
    """A decision in one line: what, details, and the reason behind a colon."""
    return " ".join(_words(decision)) + f": {decision.reason}"


def _words(decision: Decision) -> Iterator[str]:
    match decision:
        case Announce():
            yield f"log {decision.event}"
            names = ("host", "worker", "rank")
            known = {name: getattr(decision, name) for name in names}
            about = {**known, **msgspec.to_builtins(decision.what.facts())}
            yield from (f"{k}={_value(v)}" for k, v in about.items() if v is not None)
        case GiveOrder():
            yield f"order to {decision.host}.{decision.incarnation}"
            match decision.order:
                case msg.StartWorkerOrder(worker=worker, place=place, round=round_id):
                    yield f"start {worker} as rank {place.rank} of {place.size} in round {round_id}"
                case msg.StopWorkerOrder(worker=worker, grace=grace):
                    yield f"stop {worker} grace={grace:g}"
                case msg.RanksOrder(round=round_id, ranks=ranks):
                    yield f"ranks of round {round_id} " + _value(ranks)
                case order:
                    yield str(msgspec.to_builtins(order)["type"])
        case PublishWorld():
            repair = " to repair" if decision.world.repair else ""
            yield f"world of round {decision.world.round}{repair}"
            yield from (f"{m.place.rank}={m.worker}@{m.version}" for m in decision.world.members)
        case PublishSave():
            yield f"save step {decision.request.step} by {', '.join(decision.request.members)}"
        case _:
            fields = msgspec.to_builtins(decision)
            yield fields.pop("type")
            hidden = ("reason", "cause", "failure")
            yield from (f"{k}={_value(v)}" for k, v in fields.items() if k not in hidden)


def _fields(text: str) -> dict[str, object]:
    pairs = (part.split("=", 1) for part in _FIELD.split(text)[1:])
    return {name: _read(value) for name, value in pairs}


def _read(value: str) -> object:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(replay(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
