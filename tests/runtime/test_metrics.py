"""What Prometheus reads: every figure from one picture of the job.

Durations of a job: a recovery, a round and a step count once, and only what they say.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from elastic_driver.features.statistics.metrics import MOST_HOSTS
from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.metrics import JobTimes, ServerFigures, exposition
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import World
from elastic_driver.words.progress import GpuUsage, HostUsage, Measured, Pressure
from elastic_driver.words.wire_events import ScaleRequested
from elastic_driver.words.world import Member, SlotInfo
from rendezvous.answers import Histogram, RequestTimes
from tests.runtime.jobs import StartJob
from tests.runtime.waiting import until


def world(number: int, *workers: str) -> World:
    size = len(workers)
    members = tuple(
        Member(worker, SlotInfo("a", slot, slot, slot, 0, size, size, 1, 0, 1), 0)
        for slot, worker in enumerate(workers)
    )
    return World(number, members, "test")


def exited(worker: str, code: int = -9, *, expected: bool = False) -> Announce:
    return Announce(worker_log.WorkerExited(exit_code=code, expected=expected), "", worker=worker)


def counted(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), round(histogram.sum, 6)


def test_a_bucket_has_the_durations_up_to_its_bound() -> None:
    times = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.11, 1.0, 7.0):
        times.observe(seconds)
    assert times.cumulative() == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert times.sum == 0.05 + 0.1 + 0.11 + 1.0 + 7.0


def test_routes_of_one_kind_share_a_histogram() -> None:
    times = RequestTimes()
    assert times.of("/v1/hosts/{host}:drain") is times.of("/v1/hosts/{host}:undrain")
    assert times.of("/metrics") is not times.of("/v1/status")
    assert list(times.snapshot()) == ["hosts", "metrics", "status"]


def test_a_recovery_lasts_from_the_first_loss_to_the_first_step_of_a_later_round() -> None:
    times, three = JobTimes(), world(4, "a.0.1", "a.1.1", "a.2.1")
    times.announced(exited("a.0.1"), three, 10.0)
    times.announced(Announce(worker_log.WorkerLost(), "", worker="a.1.1"), three, 10.5)
    times.stepped(4, 10.6)  # a report of the world that is broken
    assert counted(times.recoveries) == (0, 0.0)
    times.stepped(5, 12.0)
    times.stepped(5, 12.1)
    assert counted(times.recoveries) == (1, 2.0)
    times.announced(Announce(worker_log.WorkerHung(), "", worker="a.2.1"), world(5, "a.2.1"), 20.0)
    times.stepped(6, 23.0)
    assert counted(times.recoveries) == (2, 5.0)


def test_only_the_unintended_end_of_a_member_is_a_loss() -> None:
    times, one = JobTimes(), world(1, "a.0.1")
    times.announced(exited("a.0.1", expected=True), one, 1.0)
    times.announced(exited("a.0.1", code=0), one, 1.0)
    times.announced(exited("b.0.1"), one, 1.0)  # a newcomer, not in the world
    times.announced(exited("a.0.1"), None, 1.0)
    times.stepped(2, 100.0)
    assert counted(times.recoveries) == (0, 0.0)


def test_a_round_lasts_from_opened_to_complete() -> None:
    times = JobTimes()
    times.announced(Announce(log.RoundOpened(), ""), None, 1.0)
    times.announced(Announce(log.RoundOpened(), ""), None, 3.0)  # the first one never was complete
    times.announced(Announce(log.RoundCompleted(), ""), None, 3.25)
    times.announced(Announce(log.RoundCompleted(), ""), None, 9.0)
    assert counted(times.rounds) == (1, 0.25)


def test_a_step_counts_once_and_those_before_the_driver_do_not() -> None:
    times = JobTimes()
    for step, seconds in ((5000, 0.1), (5003, 0.2), (5003, 0.2), (5001, 0.2), (5004, 0.5)):
        times.progressed(step, seconds)
    assert counted(times.steps) == (4, 0.6 + 0.5)


DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
MEMBER = {"slot": 0, "pid": 1, "version": 3, "leaving": ""}
HOST = {
    "slots": 2,
    "cooldown_left": 0.0,
    "reason": "",
    "agent": "ready",
    "agent_incarnation": 1,
    "workers": 1,
}
USED = HostUsage(
    cpu=0.5,
    memory_used=3,
    memory_total=8,
    disk_used=20,
    disk_total=100,
    net_in=1e6,
    net_out=2e6,
    disk_write=5e6,
    pressure=Pressure(cpu=0.25),
    gpus=(GpuUsage(index=1, name="H100", used=0.9, memory_used=70, memory_total=80),),
)
STATUS: dict[str, Any] = {
    "run_id": 'a "quoted" run',
    "endpoint": "http://127.0.0.1:1",
    "started": 1000.5,
    "state": "running",
    "kind": "elastic",
    "reason": "",
    "exit_code": None,
    "ignored": "",
    "round": 4,
    "round_state": "complete",
    "step": 170,
    "size": 2,
    "min_np": 1,
    "wanted": 3,
    "max_np": None,
    "members": [
        {**MEMBER, "worker": "a.0.1", "host": "a", "rank": 0, "state": "running"},
        {**MEMBER, "worker": "b.0.1", "host": "b", "rank": 1, "state": "running"},
        {**MEMBER, "worker": "b.1.2", "host": "b", "rank": 2, "state": "starting"},
    ],
    "hosts": [
        {**HOST, "host": "a", "state": "usable"},
        {**HOST, "host": "b", "state": "usable"},
        {**HOST, "host": "c", "state": "cool-down"},
    ],
    "counters": {
        "failures": 5,
        "max_restarts": None,
        "fruitless": 0,
        "fruitless_restarts": 3,
        "resets": 3,
        "reset_limit": None,
        "restart_count": 2,
        "ignored_events": 7,
        "false_alarms": 1,
        "slot_seconds": {"training": 900.0, "lost": 100.0},
    },
    "slow": [
        {
            "rank": 1,
            "host": "b",
            "worker": "b.0.1",
            "kind": "compute",
            "ratio": 2.5,
            "step": 99,
        }
    ],
    "suspicions": {"silent": 3},
    "goodput": {"goodput": 0.9},
    "measured": msgspec.to_builtins(
        Measured(step=171, steps_per_s=4.5, samples_per_s=288.0, samples=9000, hosts={"b": USED})
    ),
    "events": {
        "worker_hung": 2,
        "rank_slow": 4,
        "state_differs": 5,
        "work_moved": 6,
        "round_completed": 4,
        "agent_cleared": 2,
        "agent_lost": 1,
    },
}


def read(text: bytes) -> dict[tuple[str, ...], float]:
    """(name, values of the labels by their names) → value of every sample."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def figures(**changes: object) -> dict[tuple[str, ...], float]:
    status = msgspec.json.encode({**STATUS, **changes})
    requests_, times = RequestTimes(), JobTimes()
    requests_.of("/v1/kv:batch").observe(0.002)
    times.steps.observe(0.3, 170)
    times.recoveries.observe(0.07)
    server = ServerFigures({"store": 3}, {"forbidden": 2}, requests_.snapshot())
    return read(exposition(status, server, times))


def test_the_figures_are_those_of_the_status() -> None:
    found = figures()
    expected = {
        ("elastic_job_info", 'a "quoted" run'): 1,
        ("elastic_job_state", "running"): 1,
        ("elastic_job_state", "changing"): 0,
        ("elastic_job_start_time_seconds",): 1000.5,
        ("elastic_round",): 4,
        ("elastic_step",): 171,
        ("elastic_steps_per_second",): 4.5,
        ("elastic_samples_per_second",): 288,
        ("elastic_samples_total",): 9000,
        ("elastic_goodput_seconds_total", "lost"): 100,
        ("elastic_goodput_ratio",): 0.9,
        ("elastic_host_cpu_ratio", "b"): 0.5,
        ("elastic_host_memory_used_bytes", "b"): 3,
        ("elastic_host_disk_bytes", "b"): 100,
        ("elastic_host_network_receive_bytes_per_second", "b"): 1e6,
        ("elastic_host_disk_written_bytes_per_second", "b"): 5e6,
        ("elastic_host_pressure_ratio", "b", "cpu"): 0.25,
        ("elastic_gpu_used_ratio", "1", "b"): 0.9,
        ("elastic_gpu_memory_bytes", "1", "b"): 80,
        ("elastic_world_size",): 2,
        ("elastic_world_size_min",): 1,
        ("elastic_world_size_wanted",): 3,
        ("elastic_slots",): 4,
        ("elastic_workers", "running"): 2,
        ("elastic_workers", "starting"): 1,
        ("elastic_workers", "lost"): 0,
        ("elastic_hosts", "usable"): 2,
        ("elastic_hosts", "checking"): 0,
        ("elastic_hosts", "cool-down"): 1,
        ("elastic_hosts", "drained"): 0,
        ("elastic_slow_rank_ratio", "b", "compute", "1"): 2.5,
        ("elastic_worker_failures_total",): 5,
        ("elastic_restarts_total",): 2,
        ("elastic_world_changes_total",): 3,
        ("elastic_ignored_events_total",): 7,
        ("elastic_agent_suspicions_total", "silent"): 3,
        ("elastic_agent_suspicions_total", "backend"): 0,
        ("elastic_agents_cleared_total",): 2,
        ("elastic_agents_lost_total",): 1,
        ("elastic_hangs_total",): 2,
        ("elastic_slow_ranks_total",): 4,
        ("elastic_slow_rank_false_alarms_total",): 1,
        ("elastic_work_moved_total",): 6,
        ("elastic_events_total", "round_completed"): 4,
        ("elastic_step_duration_seconds_count",): 170,
        ("elastic_step_duration_seconds_sum",): pytest.approx(51.0),
        ("elastic_step_duration_seconds_bucket", "0.25"): 0,
        ("elastic_step_duration_seconds_bucket", "0.5"): 170,
        ("elastic_step_duration_seconds_bucket", "+Inf"): 170,
        ("elastic_recovery_duration_seconds_bucket", "0.1"): 1,
        ("elastic_round_duration_seconds_count",): 0,
        ("elastic_request_duration_seconds_bucket", "0.001", "kv:batch"): 0,
        ("elastic_request_duration_seconds_bucket", "0.0025", "kv:batch"): 1,
        ("elastic_limit_hits_total", "store"): 3,
        ("elastic_requests_refused_total", "forbidden"): 2,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("elastic_world_size_max",) not in found, "there is no limit"


def test_the_documentation_names_every_metric_and_no_other() -> None:
    nodes = {"generation": 1, "members": {}, "waiting": [], "lost": []}
    document = msgspec.json.encode({**STATUS, "max_np": 8, "tf": nodes})
    text = exposition(document, ServerFigures({}, {}, {}), JobTimes()).decode()
    kinds = dict(re.findall(r"^# TYPE elastic_(\w+) (\w+)$", text, re.MULTILINE))
    table = DOCS.read_text().split("| metric (`elastic_…`) | |")[1].split("\n\n")[0]
    cells = (line.split("|")[1] for line in table.splitlines()[2:])
    assert {n for cell in cells for n in re.findall(r"`(\w+)(?:{[\w,]+})?`", cell)} == set(kinds)
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {name for name in kinds if name.endswith("_total")}


def test_only_so_many_hosts_have_series() -> None:
    hosts = {f"h{number:04}": USED for number in range(MOST_HOSTS + 5)}
    found = figures(measured=Measured(hosts=hosts))
    shown = [key[1] for key in found if key[0] == "elastic_host_cpu_ratio"]
    assert shown == list(hosts)[:MOST_HOSTS]


def test_what_is_over_or_has_not_happened_yet_has_a_figure_too() -> None:
    found = figures(slow=[], events={}, members=[], hosts=[])
    assert found["elastic_hangs_total",] == 0
    assert found["elastic_workers", "running"] == 0
    assert not [key for key in found if key[0] == "elastic_slow_rank_ratio"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say_against_it() -> None:
    text = exposition(msgspec.json.encode(STATUS), ServerFigures({}, {}, {}), JobTimes())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_driver_answers_who_has_the_token_and_nobody_else(start_job: StartJob) -> None:
    job = start_job((("a", 2), ("b", 1)))
    cluster = job.cluster
    cluster.until_workers("a.0.1", "a.1.1", "b.0.1")
    cluster.ready("a.0.1", "a.1.1", "b.0.1")
    cluster.world(1)
    url = f"{cluster.endpoint}/metrics"
    assert requests.get(url, timeout=10).status_code == 401

    def scrape() -> dict[tuple[str, ...], float]:
        bearer = {"Authorization": f"Bearer {cluster.token}"}
        answer = requests.get(url, headers=bearer, timeout=10)
        answer.raise_for_status()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return read(answer.content)

    found = scrape()
    assert found["elastic_world_size",] == 3
    assert found["elastic_workers", "running"] == 3
    assert found["elastic_hosts", "usable"] == 2
    assert found["elastic_events_total", "round_completed"] == 1
    assert job.driver.post(ScaleRequested(2))
    until(lambda: scrape()["elastic_world_size_wanted",] == 2, "another size is wished")
