"""A driver is killed, and another one goes on with its run."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.journal.replay import load_run
from elastic_driver.runtime.results import read_result
from elastic_driver.runtime.run_dir import RunDir, read_endpoint
from elastic_driver.words.orders import (
    DriverTerm,
    Order,
    ShutdownOrder,
    StartWorkerOrder,
    StopWorkerOrder,
    decode,
    decode_order,
    decode_world,
)
from elastic_driver.words.progress import OutputLine, OutputLines
from elastic_driver.words.wire_events import (
    AgentReady,
    AgentReturned,
    RunningWorker,
    WireEvent,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerStepped,
)
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, SealedError
from rendezvous.wire import Delete, Number
from tests.runtime.driver_process import RUN, setup
from tests.runtime.waiting import until

A0, B0 = "a.0.1", "b.0.1"


class DriverProcess:
    """A driver process, and a client of it."""

    def __init__(self, folder: Path, hosts: str = "a:1,b:1", *, resume: bool = False) -> None:
        self.run_dir = RunDir(folder, RUN)
        argv = [sys.executable, "-m", "tests.runtime.driver_process", str(folder), hosts]
        argv += ["--resume"] if resume else []
        self.said: list[str] = []
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        pairs = (self.process.stdout, self.said), (self.process.stderr, self.errors)
        self._readers = [
            threading.Thread(target=lambda s=s, to=to: to.extend(map(str.strip, s)))  # type: ignore[misc]
            for s, to in pairs
        ]
        for reader in self._readers:
            reader.start()
        self._client: RendezvousClient | None = None

    @property
    def client(self) -> RendezvousClient:
        if self._client is None:
            endpoint = until(self._endpoint, "the driver is up", 30.0)
            assert endpoint is not None
            token = read_token_file(self.run_dir.token_file)
            self._client = RendezvousClient(endpoint, token, timeout=20.0)
        return self._client

    def _endpoint(self) -> str | None:
        assert self.process.poll() is None, self.errors
        found = read_endpoint(self.run_dir.path)
        return found.url if found is not None and found.pid == self.process.pid else None

    def post(self, event: WireEvent) -> None:
        self.client.post_json(EVENTS_PATH, msgspec.json.encode(event))

    def until_said(self, words: str) -> None:
        until(lambda: words in self.said, f"the driver says {words}, not {self.said}", 20.0)

    def order(self, host: str, number: int, incarnation: int = 1) -> Order:
        entry = self.client.get(contract.agent_order(host, incarnation, number), wait=20.0)
        assert entry is not None, f"{host} has no order {number}"
        return decode_order(entry.value)

    def orders(self, host: str, incarnation: int = 1) -> list[Order]:
        found: list[Order] = []
        while True:
            key = contract.agent_order(host, incarnation, len(found) + 1)
            entry = self.client.get(key)
            if entry is None:
                return found
            found.append(decode_order(entry.value))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.client.get_bytes(contract.STATUS_PATH))
        return found

    def kill(self) -> None:
        """End the driver as kill -9 does, at this instant."""
        self.process.kill()
        self.end()

    def end(self, within: float = 20.0) -> int:
        """Wait for the process; return its status."""
        code = self.process.wait(within)
        for reader, pipe in zip(
            self._readers, (self.process.stdout, self.process.stderr), strict=True
        ):
            reader.join(5.0)
            assert pipe is not None
            pipe.close()
        if self._client is not None:
            self._client.close()
        return code


def up(host: str, incarnation: int = 1) -> AgentReady:
    return AgentReady(host, incarnation, 1, "127.0.0.1", (20000, 20001))


def back(host: str, *workers: str, term: int = 2) -> AgentReturned:
    its = tuple(RunningWorker(worker, 7) for worker in workers)
    facts = host, 1, 1, "127.0.0.1", (20000, 20001)
    return AgentReturned(*facts, term=term, workers=its)


@contextlib.contextmanager
def drivers(folder: Path) -> Iterator[list[DriverProcess]]:
    started: list[DriverProcess] = []
    try:
        yield started
    finally:
        for driver in started:
            if driver.process.poll() is None:
                driver.process.kill()
            driver.end()


def two_train(driver: DriverProcess) -> None:
    """Bring a job of two hosts to its first step."""
    for host in ("a", "b"):
        driver.until_said(f"start {host} 1")
        driver.post(up(host))
    for host, worker in (("a", A0), ("b", B0)):
        assert isinstance(driver.order(host, 1), StartWorkerOrder)
        driver.post(WorkerStarted(worker, 7))
        driver.post(WorkerReady(worker, 0, -1, True, "waits"))
    assert driver.client.get(contract.JOB_WORLD, wait=10.0) is not None
    driver.post(WorkerStepped(A0, 1, 1))


def test_the_next_driver_has_the_address_the_job_and_newer_revisions(tmp_path: Path) -> None:
    with drivers(tmp_path) as them:
        first = DriverProcess(tmp_path)
        them.append(first)
        two_train(first)
        entry = first.client.get(contract.JOB_DRIVER)
        assert entry is not None
        assert decode(DriverTerm, entry.value) == DriverTerm(1, first.client.url)
        first.client.set("mine/a", b"kept")
        first.client.set("mine/b", b"deleted")
        first.client.set("mine/c", b"mine", lease=60.0)
        first.client.one(Delete("mine/b"), Number)
        first.post(WorkerStepped(B0, 1, 1))  # what came before it is in the journal, too
        before, world = first.status(), first.client.get(contract.JOB_WORLD)
        assert world is not None
        first.kill()
        first.run_dir.events_file.unlink()  # as on another host: the ledger is in the journal, too
        run = load_run(first.run_dir.journal_file)
        assert (run.run_id, run.argv, run.cwd) == (RUN, ("elasticrun", "true"), "/home")
        assert (run.term, run.url, run.end) == (1, first.client.url, None)

        second = DriverProcess(tmp_path, resume=True)
        them.append(second)
        assert second.client.url == first.client.url
        entry = second.client.get(contract.JOB_DRIVER)
        assert entry is not None
        assert decode(DriverTerm, entry.value) == DriverTerm(2, first.client.url)
        assert entry.revision > 2 << 40 > world.revision
        assert second.client.get(contract.JOB_SPEC) is not None
        kept = [second.client.get(f"mine/{name}") for name in "abc"]
        assert [entry and entry.value for entry in kept] == [b"kept", None, None]
        for host, worker in (("a", A0), ("b", B0)):
            second.post(back(host, worker))
            second.until_said(f"adopt {host} 1")
        again = second.client.get(contract.JOB_WORLD, wait=10.0)
        assert again is not None
        assert decode_world(again.value).members == decode_world(world.value).members
        after = second.status()
        for name in ("round", "state", "members"):
            assert after[name] == before[name], name
        spent, whole = after["goodput"]["seconds"], after["goodput"]["wall"]
        # One worker is the least that is wanted, until both hosts are discovered.
        assert whole < sum(spent.values()) <= 2 * whole * 1.001
        assert after["goodput"]["slots"] == pytest.approx(2.0, rel=0.1)
        assert spent["training"] > before["goodput"]["seconds"]["training"] > 0
        assert whole > before["goodput"]["wall"]
        assert after["started"] == pytest.approx(before["started"], abs=1.0)
        assert not any(said.startswith("start ") for said in second.said)


def test_a_job_goes_on_with_the_next_driver_to_its_end(tmp_path: Path) -> None:
    with drivers(tmp_path) as them:
        them.append(DriverProcess(tmp_path))
        two_train(them[0])
        them[0].kill()
        them.append(DriverProcess(tmp_path, resume=True))
        second = them[1]
        second.post(back("a", A0))
        second.post(WorkerExited(B0, -9, "", False))  # while there was no driver
        second.post(back("b"))
        orders = until(lambda: starts(second.orders("b")), "a new worker is started on b")
        assert [order.worker for order in orders] == ["b.0.1001"]
        assert starts(second.orders("a")) == []
        second.kill()  # once more

        them.append(DriverProcess(tmp_path, resume=True))
        third = them[2]
        third.post(back("a", A0, term=3))
        third.post(back("b", "b.0.1001", term=3))
        third.post(WorkerStarted("b.0.1001", 8))
        for worker, left in (("b.0.1001", 0), (A0, 1)):
            third.post(WorkerReady(worker, left, 1, True, "waits"))
        world = until(lambda: world_of(third, 2), f"round 2: {third.errors}", 30.0)
        assert world == [A0, "b.0.1001"]
        for worker in world:
            third.post(WorkerExited(worker, 0, "", False))
        for host in ("a", "b"):
            until(lambda h=host: told_to_end(third.orders(h)), f"host {host} is told to end")
        assert third.end() == 0
        assert not third.run_dir.token_file.exists()
        result = read_result(third.run_dir.events_file)
        assert result is not None
        assert {worker.worker for worker in result.workers} == {A0, "b.0.1001"}


def test_a_line_of_output_whose_answer_was_lost_is_written_by_one_of_two_drivers(
    tmp_path: Path,
) -> None:
    def send(driver: DriverProcess, first: int, *lines: str) -> None:
        sent = OutputLines("a", 1, first, tuple(OutputLine(1, line) for line in lines))
        driver.client.post_json(contract.OUTPUT_PATH, msgspec.json.encode(sent))

    with drivers(tmp_path) as them:
        them.append(DriverProcess(tmp_path))
        two_train(them[0])
        send(them[0], 1, "one", "two")
        them[0].until_said("two")
        them[0].kill()
        them.append(DriverProcess(tmp_path, resume=True))
        send(them[1], 1, "one", "two", "three")  # to the agent, the first answer was lost
        them[1].until_said("three")
        assert not {"one", "two"} & set(them[1].said)
        assert them[1].client.get("job/output/a/1") is None  # nobody's business


def test_an_agent_that_was_given_up_is_refused_by_the_next_driver_too(tmp_path: Path) -> None:
    with drivers(tmp_path) as them:
        them.append(DriverProcess(tmp_path))
        two_train(them[0])
        them[0].client.set(contract.agent_lease("b", 1), b"", lease=0.2)
        them[0].until_said("kill b 1")
        them[0].kill()
        them.append(DriverProcess(tmp_path, resume=True))
        second = them[1]
        second.post(back("a", A0))
        second.until_said("adopt a 1")
        with pytest.raises(SealedError):
            second.client.set(contract.agent_lease("b", 1), b"", lease=30.0)


def starts(orders: list[Order]) -> list[StartWorkerOrder]:
    return [order for order in orders if isinstance(order, StartWorkerOrder)]


def told_to_end(orders: list[Order]) -> bool:
    return bool(orders) and isinstance(orders[-1], ShutdownOrder)


def world_of(driver: DriverProcess, round_id: int) -> list[str]:
    entry = driver.client.get(contract.JOB_WORLD)
    world = None if entry is None else decode_world(entry.value)
    return [] if world is None or world.round < round_id else [m.worker for m in world.members]


def test_no_shard_is_handed_out_by_a_driver_that_does_not_know_its_job_yet(tmp_path: Path) -> None:
    dataset = {"type": "range", "records": 30, "shard_records": 10, "shuffle": False}
    asked = msgspec.json.encode({"worker": "a.0.1", "dataset": dataset, "wait": 0.0})
    with drivers(tmp_path) as them:
        them.append(first := DriverProcess(tmp_path))
        first.until_said("start a 1")  # so the job has begun, and its journal
        granted = [json.loads(first.client.post_json("/v1/shards/d:next", asked))]
        token = read_token_file(first.run_dir.token_file)
        first.kill()
    driver = ElasticDriver(setup(tmp_path, "a:1,b:1", resume=True))
    driver.open()
    try:
        with RendezvousClient(driver.endpoint, token) as client:
            with pytest.raises(RendezvousError):
                client.post_json("/v1/shards/d:next", asked, 0.3)
            driver.start()
            granted.append(json.loads(client.post_json("/v1/shards/d:next", asked, 20.0)))
    finally:
        driver.abandon()
    assert [each["shard"]["start"] for each in granted] == [0, 10]


def test_a_job_whose_end_was_decided_ends_with_the_next_driver(tmp_path: Path) -> None:
    with drivers(tmp_path) as them:
        them.append(DriverProcess(tmp_path))
        two_train(them[0])
        for worker in (A0, B0):
            them[0].post(WorkerExited(worker, 3, "it broke\n", False))
        them[0].kill()
        run = load_run(them[0].run_dir.journal_file)
        assert run.end is not None
        them.append(DriverProcess(tmp_path, resume=True))
        for host in ("a", "b"):
            them[1].post(back(host))
            assert isinstance(them[1].order(host, 1), ShutdownOrder | StopWorkerOrder)
        assert them[1].end() == 3
        result = read_result(them[1].run_dir.events_file)
        assert result is not None
        assert result.exit_code == 3
        assert [worker.exit_code for worker in result.workers] == [3, 3]
        assert not them[1].run_dir.token_file.exists()


def test_the_port_of_agents_that_cannot_be_called_is_awaited_and_the_run_can_go_on_later(
    tmp_path: Path,
) -> None:
    with drivers(tmp_path) as them:
        them.append(DriverProcess(tmp_path))
        two_train(them[0])
        port = int(them[0].client.url.rsplit(":", 1)[1])
        them[0].kill()
        with socket.create_server(("127.0.0.1", port)):
            them.append(DriverProcess(tmp_path, resume=True))
            assert them[1].end(30.0) == 75
        (line,) = them[1].errors
        assert f"cannot listen on 127.0.0.1:{port}" in line
        assert "look for their driver there" in line
        them.append(DriverProcess(tmp_path, resume=True))
        assert them[2].client.url == them[0].client.url
        entry = them[2].client.get(contract.JOB_DRIVER)
        assert entry is not None
        assert decode(DriverTerm, entry.value).term == 3
