"""Hosts whose workers wait for processors are found, and no others."""

from __future__ import annotations

import pytest

from elastic_driver.features.sizes.machine import LASTS_S, Starvation
from elastic_driver.features.sizes.messages import HostLoad, LoadsSeen
from elastic_driver.job.events import HostStarved

QUIET = HostLoad(host="a", workers=4, compute=0.10, cpu=0.6, pressure=0.05)
STARVED = HostLoad(host="b", workers=4, compute=0.15, cpu=0.99, pressure=0.8)


def seen(*hosts: HostLoad, number: int = 1, held: bool = False) -> LoadsSeen:
    """The loads in the round of this number."""
    return LoadsSeen(round=number, hosts=hosts, held=held)


def watched(machine: Starvation, event: LoadsSeen, seconds: float = LASTS_S) -> list[HostStarved]:
    """What it proposes if this is seen each second, for so long."""
    found: list[HostStarved] = []
    for second in range(int(seconds) + 1):
        for sent in machine.handle(event, 100.0 + second):
            assert isinstance(sent.event, HostStarved)
            found.append(sent.event)
    return found


def changed(load: HostLoad, **facts: object) -> HostLoad:
    known = {name: getattr(load, name) for name in load.__struct_fields__}
    return HostLoad(**{**known, **facts})


def test_a_host_that_is_starved_for_long_is_to_have_a_worker_less() -> None:
    (event,) = watched(Starvation(), seen(QUIET, STARVED))
    assert (event.host, event.workers) == ("b", 3)
    assert event.reason == (
        "its processors were 99% busy for 30 s, and its workers compute 1.5 times as long as others"
    )


def test_it_looks_again_as_long_before_the_next_worker() -> None:
    machine = Starvation()
    assert len(watched(machine, seen(QUIET, STARVED), 2 * LASTS_S)) == 1
    assert watched(machine, seen(QUIET, STARVED, number=2), LASTS_S - 1) == []
    assert len(watched(machine, seen(QUIET, STARVED, number=2), LASTS_S)) == 1


@pytest.mark.parametrize(
    "loads",
    [
        (QUIET,),
        (STARVED,),  # there is no other host to compare it with
        (QUIET, changed(STARVED, compute=0.11)),  # busy, and as fast as the others
        (QUIET, changed(STARVED, cpu=0.5)),  # slow for another reason
        (QUIET, changed(STARVED, pressure=0.1)),  # nobody waits
        (QUIET, changed(STARVED, workers=1)),  # the last one stays
        (STARVED, changed(STARVED, host="a")),  # all are alike
        (changed(QUIET, compute=0.0), changed(STARVED, compute=0.0)),
    ],
)
def test_other_hosts_keep_their_workers(loads: tuple[HostLoad, ...]) -> None:
    assert watched(Starvation(), seen(*loads), 3 * LASTS_S) == []


def test_a_kernel_that_tells_no_pressure_leaves_the_other_signs() -> None:
    (event,) = watched(Starvation(), seen(QUIET, changed(STARVED, pressure=None)))
    assert event.host == "b"


def test_a_host_that_recovers_begins_anew() -> None:
    machine = Starvation()
    assert watched(machine, seen(QUIET, STARVED), LASTS_S - 1) == []
    assert watched(machine, seen(QUIET, changed(STARVED, cpu=0.5)), 1) == []
    assert watched(machine, seen(QUIET, STARVED), LASTS_S - 1) == []


def test_while_a_user_holds_a_size_nothing_is_proposed() -> None:
    assert watched(Starvation(), seen(QUIET, STARVED, held=True), 3 * LASTS_S) == []
