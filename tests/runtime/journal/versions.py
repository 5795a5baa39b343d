"""The journal of a job in the midst of everything, as this version writes it.

`python -m tests.runtime.journal.versions FOLDER` writes it, with what is known of the job at its
end, for versions to come: `kept/` has those of earlier versions, which must stay readable.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver.contract import FIRST_OF_CHECKS
from elastic_driver.features.checks.machine import CheckLimits, NodeChecker
from elastic_driver.features.shards import messages as shards
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job import events as seen
from elastic_driver.job.decisions import Announce, Decision
from elastic_driver.job.events import Tick
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal.journal_file import Head
from elastic_driver.runtime.journal.replay import Replay
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from tests.job.scenario import Scenario

NAME = "journal.db"
TWENTY = shards.RangeDescription(20, 5, epochs=2)
REQUESTS = (
    shards.NextRequest("a.0.1", TWENTY, 5.0, request="first"),
    shards.NextRequest("b.0.1", TWENTY, 5.0),
    shards.AgreeRequest("a.0.1", TWENTY, (), request="agreed"),
)


class Written:
    """A machine whose events are written before it decides."""

    def __init__(self, book: Book, name: str, machine: Any) -> None:
        self.book, self.name, self.machine = book, name, machine

    def handle(self, event: Any, now: float) -> Any:
        self.book.note(now, self.name, event)
        return self.machine.handle(event, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)


class Book:
    """A journal, and the machines that are in it."""

    def __init__(self, path: Path, **machines: Any) -> None:
        self.journal, self.n = Journal(path, "kept"), 0
        self.machines = {name: Written(self, name, made) for name, made in machines.items()}
        self.journal.open(Head("kept", ("elasticrun", "train.py"), "/home/user"))
        self.journal.serves_at("http://127.0.0.1:29400")
        self.snapshot(0.0)

    def note(self, now: float, name: str, event: Any) -> None:
        self.n += 1
        self.journal.note(self.n, now, name, event)
        assert self.journal.settle() == []

    def snapshot(self, now: float) -> None:
        states = {name: m.machine.snapshot() for name, m in self.machines.items()}
        self.journal.snapshot(self.n, now, states)


def write(path: Path) -> None:
    """Write the journal of a job that has lost and replaced a worker, drains a host, and so on."""
    job = Job(Settings(start_np=3, min_np=1, max_np=4, spares=1, replace_slow=True))
    check = NodeChecker([("x", 1), ("y", 1)], number=0, limits=CheckLimits())
    book = Book(path, job=job, check=check, shards=DataSets(), tf=TfCluster(30.0))
    play = Scenario(start_np=3)
    play.job = book.machines["job"]  # type: ignore[assignment]
    play.training(a=2, b=1, c=1)
    play.send(seen.HostsMeasured((("a", 2**33),)))
    play.exit("a.1.1", -9)
    settle(play, step=7)
    data, cluster, nodes = (book.machines[name] for name in ("shards", "tf", "check"))
    for ticket, request in enumerate(REQUESTS):
        data.handle(shards.ShardBatch((shards.ShardRequest(ticket, "d", request),)), 150.0)
    for ticket, node in enumerate("pq"):
        asked = tf.ClusterSpecRequest(f"{node}:1", 2, 3, 2.0, request="r")
        cluster.handle(tf.TfRequest(100 + ticket, asked), 150.0)
    cluster.handle(Tick(), 153.0)
    cluster.handle(tf.TfRequest(110, tf.BarrierRequest("p:1", "start", 60.0)), 154.0)
    nodes.handle(Tick(), 150.0)
    nodes.handle(ev.AgentReady("x", FIRST_OF_CHECKS, 7, "x", (5000,)), 151.0)
    book.snapshot(play.now)
    play.send(ev.DrainRequested("b", "new disks", 60.0))
    settle(play, step=9)
    play.agent_lost("c")
    data.handle(shards.ShardBatch((shards.ShardRequest(9, "d", REQUESTS[1]),)), 160.0)
    cluster.handle(tf.TfRequest(111, tf.BarrierRequest("q:1", "start", 60.0)), 160.0)
    nodes.handle(ev.AgentReady("y", FIRST_OF_CHECKS, 8, "y", (5000,)), 161.0)
    book.journal.close()


def settle(play: Scenario, step: int) -> None:
    """Let all workers that start or have been told to leave meet in the next round, and train."""
    play.obey_stops()
    play.ready(*play.starting)
    play.wait(2.0)
    play.ready(*play.in_state("running"), version=step)
    play.obey_stops()
    play.step(*play.members, step=step)


def known(path: Path, *, from_newest: bool = False) -> dict[str, Any]:
    """Return what a driver knows of the job after the last event of a journal."""
    replay = Replay(path)
    decided = [step.decisions for step in replay.steps(from_newest=from_newest)]
    replay.close()
    job, now = replay.job, replay.now
    machines = {name: machine.deadline() for name, machine in replay.machines.items()}
    found = {
        "run": [replay.run_id, replay.argv, replay.cwd, len(replay.terms)],
        "status": job.status(now),
        "deadlines": machines,
        "decided": [[type(each).__name__ for each in some] for some in decided],
        "shards": replay.machines["shards"].handle(READ, now),
        "resumed": [
            shown(each)
            for each in job.handle(seen.DriverResumed(job.adoption.term + 1, "it died"), now)
        ],
        "violated": [said for machine in replay.machines.values() for said in machine.check()],
    }
    return json.loads(msgspec.json.encode(found))  # type: ignore[no-any-return]


def shown(decision: Decision) -> Any:
    """Return a decision as the kept journals have it: an announcement is a name with details."""
    if not isinstance(decision, Announce):
        return decision
    about = {name: getattr(decision, name) for name in decision.__struct_fields__ if name != "what"}
    what = decision.what
    return {"type": "announce", "event": what.name, "detail": what.facts(), **about}


READ = shards.ShardBatch((shards.ShardRequest(1, "d", shards.ReadStatus()),))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write(folder / NAME)
    (folder / "known.json").write_text(json.dumps(known(folder / NAME), indent=1) + "\n")
