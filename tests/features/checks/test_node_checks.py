"""Real checks: agents as processes, tasks that meet through the rendezvous, troubles on purpose."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from elastic_driver.contract import FIRST_OF_CHECKS
from elastic_driver.errors import UsageError
from elastic_driver.features.checks.driver import CheckSettings
from elastic_driver.features.checks.evidence import Verdict
from elastic_driver.features.checks.messages import TaskSettings
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.runtime.backend import OnLost
from launcher.backends.local import LocalBackend
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from tests.runtime.checks import check_without_a_job
from tests.support.processes import descendants, read_each, select

HERE = ("localhost", "127.0.0.2", "127.0.0.3", "127.0.0.4")
TASK = (sys.executable, "-m", "tests.runtime.check_tasks")
LIMIT_S = 90.0  # for what should take a second or two on a machine that is not busy


def settings(troubles: dict[str, str] | None = None) -> CheckSettings:
    return CheckSettings(
        start_timeout=LIMIT_S,
        task_timeout=LIMIT_S,
        command=TASK,
        warm=0,
        env={"TROUBLES": json.dumps(troubles or {})},
    )


def is_new(process: psutil.Process, before: set[psutil.Process]) -> bool:
    """Whether a process and its parents are none of those before: a server of other tests forks."""
    return before.isdisjoint((process, *process.parents()))


def check(
    folder: Path,
    hosts: int,
    chosen: CheckSettings,
    starter: Callable[[str, Path], LocalBackend] = LocalBackend,
    say: Callable[[str], None] = lambda _line: None,
    slots: int = 1,
) -> CheckReport:
    before = set(descendants(os.getpid()))  # other tests' zombies, adopted here
    report = check_without_a_job(
        tuple((host, slots) for host in HERE[:hosts]),
        settings=chosen,
        make_backend=starter,
        folder=folder,
        say=say,
    )
    left = select(descendants(os.getpid()), lambda child: is_new(child, before))
    words = read_each(left, psutil.Process.cmdline)
    assert not left, f"the check left processes behind: {words}"
    assert list((folder / "check").iterdir()) == []
    return report


def test_healthy_nodes_are_good_after_one_round(tmp_path: Path) -> None:
    said: list[str] = []
    report = check(tmp_path, 3, settings(), say=said.append)
    assert report.named(Verdict.GOOD) == HERE[:3]
    assert [line.rpartition(", after ")[0] for line in said] == [
        "node check: agents are up on 3 of 3 nodes",
        "node check: round 1, 3 nodes in 1 group",
        "node check: measuring",
        "node check: measured "
        + "; ".join(f"{h} 1.00 s computing, 500 ms network" for h in HERE[:3]),
    ]
    assert [n.compute for n in report.nodes] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("broken", "exit code 1: RuntimeError: the device fell off the bus"),
        ("dies", "signal 9"),
        ("silent", "it ended without a usable result"),
        ("nonsense", "it ended without a usable result"),
    ],
)
def test_a_node_whose_task_fails_is_faulty_and_its_partner_is_not(
    tmp_path: Path, trouble: str, reason: str
) -> None:
    report = check(tmp_path, 2, settings({HERE[1]: trouble}))
    assert report.named(Verdict.FAULTY) == (HERE[1],)
    assert report.named(Verdict.GOOD) == (HERE[0],)
    assert report.nodes[1].reason == f"failed alone: {reason}"
    assert report.excluded(stragglers=False) == {HERE[1]: f"faulty: failed alone: {reason}"}


def test_a_task_that_hangs_is_ended_at_its_deadline(tmp_path: Path) -> None:
    chosen = replace(settings({HERE[0]: "hangs"}), task_timeout=4.0)
    report = check(tmp_path, 2, chosen)
    assert report.nodes[0].verdict is Verdict.FAULTY
    assert "not done within 4 s (--check-timeout)" in report.nodes[0].reason


@pytest.mark.parametrize("trouble", ["slow", "slow-and-stays"])
def test_a_slow_node_is_paired_with_a_fast_one_before_it_is_called_a_straggler(
    tmp_path: Path, trouble: str
) -> None:
    said: list[str] = []
    report = check(tmp_path, 4, settings({HERE[2]: trouble}), say=said.append)
    assert report.named(Verdict.STRAGGLER) == (HERE[2],)
    assert "computing takes 6 s, 6.0 times the usual" in report.nodes[2].reason
    assert any(line.startswith("node check: round 2, 2 nodes in 1 group") for line in said)
    assert report.excluded(stragglers=False) == {}
    assert list(report.excluded(stragglers=True)) == [HERE[2]]


def test_a_node_is_checked_on_all_its_devices_and_fails_with_one_of_them(tmp_path: Path) -> None:
    report = check(tmp_path, 2, settings({HERE[0]: "broken"}), slots=2)
    assert report.named(Verdict.FAULTY) == (HERE[0],)


class PickyBackend(LocalBackend):
    """Cannot start an agent on one of the hosts."""

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        if host == HERE[1]:
            on_lost("ssh: connect to 127.0.0.2 timed out")
        else:
            super().start(host, incarnation, on_lost)


def test_a_host_that_cannot_be_reached_is_faulty_and_holds_nobody_up(tmp_path: Path) -> None:
    report = check(tmp_path, 3, settings(), starter=PickyBackend)
    assert report.nodes[1].verdict is Verdict.FAULTY
    assert report.nodes[1].reason == "ssh: connect to 127.0.0.2 timed out"
    assert report.named(Verdict.GOOD) == (HERE[0], HERE[2])


def test_an_agent_that_is_killed_in_the_middle_costs_its_node_the_verdict(tmp_path: Path) -> None:
    backends: list[LocalBackend] = []

    def starter(endpoint: str, token_file: Path) -> LocalBackend:
        backends.append(LocalBackend(endpoint, token_file))
        return backends[0]

    def kill(line: str) -> None:
        if "round 1" in line:
            backends[0].kill(HERE[1], FIRST_OF_CHECKS)

    report = check(tmp_path, 2, settings(), starter=starter, say=kill)
    assert report.nodes[1].verdict is Verdict.FAULTY
    assert "killed by SIGKILL" in report.nodes[1].reason
    assert report.nodes[0].verdict is Verdict.GOOD


def test_what_is_known_so_far_is_shown_over_http(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    def look(line: str) -> None:
        if ": round " not in line:
            return
        looking.append(threading.Thread(target=read))  # this one is the driver's
        looking[-1].start()

    def read() -> None:
        folder = tmp_path / "check"
        url = json.loads((folder / "endpoint.json").read_text())["url"]
        with RendezvousClient(url, read_token_file(folder / "token")) as client:
            seen.append(json.loads(client.get_bytes("/v1/status")))

    looking: list[threading.Thread] = []
    check(tmp_path, 4, settings({HERE[2]: "slow"}), say=look)
    for thread in looking:
        thread.join(10)
    assert [status["state"] for status in seen] == ["checking", "checking"]
    assert [status["rounds"] for status in seen] == [0, 1]


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "check").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="cannot keep the run's files"):
        check(tmp_path, 1, settings())


@pytest.mark.slow
def test_the_real_task_measures_a_pair(tmp_path: Path) -> None:
    chosen = CheckSettings(
        start_timeout=LIMIT_S,
        task_timeout=LIMIT_S,
        env={"OMP_NUM_THREADS": "1"},
        task=TaskSettings(products=5, payload=65536, performance=True, model=True, model_steps=1),
    )
    report = check(tmp_path, 2, chosen)
    assert report.named(Verdict.GOOD) == HERE[:2]
    for node in report.nodes:
        assert node.compute is not None
        assert 0 < node.compute < LIMIT_S
        assert node.history
        for measured in node.history:  # more than one if the machine was busy with other things
            assert measured.bandwidth is not None
            assert measured.bandwidth > 0
    assert "GB/s" in report.render()
