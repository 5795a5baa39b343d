"""Machines that come back from their snapshots after each event go on as if nothing had happened.

The stories are those of the machines' own tests, and random requests for shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import pytest

from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.job.events import DriverResumed, Tick
from elastic_driver.kernel.services import RequestDropped
from elastic_driver.words import wire_events as ev
from tests.features.checks import test_checker
from tests.features.tensorflow import test_tf_cluster
from tests.sim.restoring import Restoring

MACHINES = {
    test_tf_cluster: "TfCluster",
    test_checker: "NodeChecker",
}
STORIES = [
    (module, story)
    for module in MACHINES
    for name, story in vars(module).items()
    if name.startswith("test_") and not inspect.signature(story).parameters
]
SETS: tuple[m.Description, ...] = (
    m.RangeDescription(100, 10, epochs=2),
    m.RangeDescription(1000, 7, epochs=None, seed=5, max_losses=1),
    m.StreamDescription({"a": 0, "b": 5}, 4),
)


@pytest.mark.parametrize(("module", "story"), STORIES, ids=lambda given: given.__name__)
def test_the_stories_of_a_machine_hold_for_restored_ones(
    module: ModuleType, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Restoring] = []
    kind = getattr(module, MACHINES[module])

    def beside_a_twin(*args: Any, **more: Any) -> Restoring:
        made.append(Restoring(kind(*args, **more), 0, often=1.0))
        return made[-1]

    monkeypatch.setattr(module, MACHINES[module], beside_a_twin)
    story()
    for machine in made:
        machine.compare()
    assert made


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_restored_data_sets_hand_out_the_same_shards(first: int) -> None:
    for seed in range(first, first + 25):
        random, sets = Random(seed), Restoring(DataSets(), seed)
        held: list[tuple[str, m.Granted]] = []
        now = 0.0
        for ticket in range(200):
            now += random.choice([0.0, 0.1, 1.0, 20.0])
            worker = f"h{random.randrange(3)}.{random.randrange(2)}.{1 + ticket // 80}"
            ask = partial(m.ShardRequest, ticket, random.choice("abc"))
            for reply in sets.handle(_event(random, ask, worker, held), now):
                document = getattr(reply, "document", None)
                if isinstance(document, m.Granted):
                    held.append((worker, document))
            assert sets.check() == []
        sets.compare()


def _event(
    random: Random, ask: Callable[..., Any], worker: str, held: list[tuple[str, m.Granted]]
) -> Any:
    """Return the next event of a random story."""
    described = SETS["abc".index(ask.args[1])]  # type: ignore[attr-defined]
    match random.randrange(12):
        case 0:
            return ev.WorkerStarted(worker, 7)
        case 1:
            return ev.WorkerExited(worker, random.choice([0, 1, -9]), "")
        case 2:
            resumed = DriverResumed(2, "the driver has died")
            return random.choice([Tick(), m.StopOrdered(worker), resumed])
        case 3:
            return ask(m.ResumeRequest(worker, described, {1: 2, 7: 0}))
        case 4 if isinstance(described, m.StreamDescription):
            return ask(m.ExtendRequest("a", random.randrange(60)))
        case 5:
            return RequestDropped("shards", random.randrange(200))
        case 6 | 7 | 8 if held:
            holder, granted = held.pop(random.randrange(len(held)))
            return ask(m.DoneRequest(holder, granted.shard, granted.token))
        case _:
            wait = random.choice([0.0, 5.0])
            name, who = random.choice(["", "one", "two"]), random.choice([worker, m.WORLD])
            return ask(m.NextRequest(who, described, wait, request=name))
