"""What `elasticctl status` shows of what was measured, and of jobs with many workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from launcher import readable as figures
from launcher.ctl_commands import job_text as show
from tests.job.scenario import Scenario

GIB = 2**30


def document(hosts: dict[str, int], **more: Any) -> show.JobDocument:
    """The status of a job on these hosts, as the driver sends it."""
    s = Scenario(start_np=sum(hosts.values()), min_np=1).training(**hosts)
    s.now += 300.0
    told = {"run_id": "r1", "endpoint": "http://127.0.0.1:5", "started": 1000.0}
    picture = msgspec.to_builtins(s.job.status(s.now))
    return show.read_job(msgspec.json.encode({**told, **picture, **more}))


def measured(workers: list[str], hosts: list[str]) -> dict[str, Any]:
    worker = {"step": 1234, "steps_per_s": 2.5, "samples_per_s": 160.0, "memory": GIB, "cpu": 1.0}
    memory = {"memory_used": 4 * GIB, "memory_total": 16 * GIB}
    host = {"cpu": 0.5, **memory, "disk_used": 1, "disk_total": 2, "net_in": 0.0, "net_out": 1.0}
    speed = {"steps_per_s": 2.5, "samples_per_s": 320.0, "samples": 394880}
    whole = {"step": 1234, "total": 5000, "numbers": {"loss": 0.31234}, **speed}
    each = {name: {**worker, "step": 1234 + n} for n, name in enumerate(workers)}
    return {**whole, "workers": each, "hosts": dict.fromkeys(hosts, host)}


def test_step_speed_and_memory_stand_beside_each_host_and_worker() -> None:
    figures_of_it = measured(["a.0.1"], ["a"])
    spent = {"seconds": {"training": 970.0, "forming": 20.0, "lost": 10.0}, "goodput": 0.97}
    lines = show.job(
        document({"a": 1, "b": 1}, measured=figures_of_it, goodput=spent), 1360.0
    ).splitlines()
    assert lines[1] == "running for 6 min, round 1: 2 workers (any wanted, 1 to any) for 5 min"
    assert lines[2] == (
        "step 1,234 of 5,000, 2.50 steps/s, 320 samples/s, 394,880 samples, loss 0.3123, "
        "about 25 min left"
    )
    assert lines[3] == "goodput 97.0% (forming 2.0%, lost 1.0%)"
    cells = [line.split() for line in lines]
    assert ["a", "usable", "1", "1", "ready", "50%", "4.0", "GiB", "of", "16.0", "GiB"] in cells
    assert ["b", "usable", "1", "1", "ready", "-", "-"] in cells, "nothing is known of it yet"
    head = next(line for line in lines if line.startswith("RANK"))
    assert head.split()[5:] == ["WORKER", "STEP", "STEPS/S", "SAMPLES/S", "MEMORY"]
    ranks = [line.split()[5:] for line in lines if line[:1].isdigit()]
    assert ranks == [
        ["a.0.1", "1,234", "2.50", "160", "1.0", "GiB"],
        ["b.0.1", "-", "-", "-", "-"],
    ]


def test_more_than_fifty_workers_are_shown_by_host() -> None:
    hosts = {f"n{n:02}": 8 for n in range(20)}
    names = [f"{host}.{slot}.1" for host in hosts for slot in range(8)]
    found = document(hosts, measured=measured(names, [*hosts]))
    lines = show.job(found, 1360.0).splitlines()
    assert len(lines) < 60
    row = next(line for line in lines if line.startswith("n01 ") and "running" in line)
    assert row.split()[:5] == ["n01", "8", "8-15", "8", "running"]
    assert row.split()[5:] == ["1,249", "2.50", "1,280", "8.0", "GiB"]
    assert len(show.job(found, 1360.0, every=True).splitlines()) > 180


def test_more_than_fifty_hosts_are_shown_by_state_and_those_in_trouble_one_by_one() -> None:
    found = document({f"n{n:03}": 1 for n in range(200)})
    odd = {"state": "draining", "reason": "new disks"}
    changed = [msgspec.structs.replace(found.hosts[7], **odd), *found.hosts[8:]]
    leaving = msgspec.structs.replace(found.members[7], leaving="new disks")
    members = (*found.members[:7], leaving, *found.members[8:])
    shown = msgspec.structs.replace(found, hosts=(*found.hosts[:7], *changed), members=members)
    lines = show.job(shown, 1360.0).splitlines()
    assert len(lines) < 20
    assert ["usable", "199", "199", "199", "-", "-"] in [line.split() for line in lines]
    assert [line.split()[:2] for line in lines if line.startswith("n007")] == [["n007", "draining"]]
    assert any(line.startswith("7 ") and "leaves: new disks" in line for line in lines)


def test_of_many_in_trouble_the_first_are_shown_and_the_rest_counted() -> None:
    found = document({f"n{n:03}": 1 for n in range(100)})
    hosts = tuple(msgspec.structs.replace(h, state="cool-down") for h in found.hosts)
    text = show.job(msgspec.structs.replace(found, hosts=hosts), 1360.0)
    assert "… and 80 more hosts; --all shows every one" in text


@pytest.mark.parametrize(
    ("number", "words"),
    [(None, "-"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_a_rate_has_three_digits(number: float | None, words: str) -> None:
    assert figures.rate(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * GIB, "3.0 GiB")],
)
def test_a_size_has_the_largest_unit_that_fits(number: int | None, words: str) -> None:
    assert figures.size(number) == words


def test_gpus_have_a_column_where_there_are_any() -> None:
    known = measured(["a.0.1"], ["a"])
    memory = {"memory_used": 20 * GIB, "memory_total": 80 * GIB}
    gpus = [{"index": n, "name": "H100", "used": 0.9 + n / 10, **memory} for n in range(2)]
    known["hosts"]["a"] = {**known["hosts"]["a"], "gpus": gpus}
    text = show.hosts(document({"a": 1, "b": 1}, measured=known))
    assert "GPUS" in text.splitlines()[0]
    assert "95%, 40.0 GiB of 160.0 GiB" in text
