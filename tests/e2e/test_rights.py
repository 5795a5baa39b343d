"""What tokens allow in a job that trains: those of its own workers, of operators and readers."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.run_dir import read_endpoint
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words import orders as documents
from elastic_driver.words.wire_events import HostLeaving, WorkerExited, WorkerReady
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RefusedError, RequestError, UnauthorizedError
from rendezvous.wire import Count, Delete, DeletePrefix, Get, Operation, Set
from tests.support.job import JOBS, RunningJob, elasticrun

SHUTDOWN = documents.encode(documents.ShutdownOrder("a worker says so", 0.0))
NOTICE = documents.encode(documents.Notice(1, None, "a worker says so"))


@pytest.fixture(scope="module")
def job() -> Iterator[RunningJob]:
    """Two workers that train until they are stopped."""
    train = str(JOBS / "train.py")
    bound = ("--limit", "users_bytes=20000")
    with elasticrun("-np", "2", *bound, "--", train, env={"STEPS": "100000"}) as running:
        running.until_size(2)
        yield running


def client_of(job: RunningJob, token_file: Path) -> RendezvousClient:
    endpoint = read_endpoint(job.run_dir)
    assert endpoint is not None
    return RendezvousClient(endpoint.url, read_token_file(token_file), repeats=False)


def environments(job: RunningJob) -> list[dict[str, str]]:
    """The variables that the workers were born with, by their names."""
    found = [psutil.Process(pid).environ() for pid in job.live()]
    return sorted(found, key=lambda env: env[contract.WORKER_ID])


def test_a_worker_that_overwrites_orders_is_refused_and_everybody_trains_on(
    job: RunningJob,
) -> None:
    one, other = environments(job)
    me, peer = one[contract.WORKER_ID], other[contract.WORKER_ID]
    files = [Path(env[contract.TOKEN_FILE]) for env in (one, other)]
    driver_token = read_token_file(job.run_dir / "token")
    of_agent = agent_token(driver_token, "localhost")
    assert [read_token_file(file) for file in files] == [
        worker_token(of_agent, name) for name in (me, peer)
    ], "each worker has a token of its own"
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    operations: list[Operation] = [
        *(Set(contract.agent_order("localhost", 1, n), SHUTDOWN) for n in range(1, 9)),
        *(Set(key, NOTICE) for key in (contract.JOB_NOTICE, contract.JOB_WORLD)),
        Set(contract.agent_lease("localhost", 1), lease=0.01),
        Delete(contract.agent_heartbeat("localhost", 1)),
        Set(contract.worker_lease(peer), lease=0.01),
        Get((contract.worker_progress(peer),)),
        Get((contract.agent_order("localhost", 1, 1),)),
        *(Set(f"rounds/{n}/mine") for n in (0, 2, 10**9 + 1)),
        DeletePrefix("rounds/1/", seal=True),
        DeletePrefix("job/"),
        Count(),
    ]
    events = (
        HostLeaving("localhost", 1, 0.1, "a worker says so"),
        WorkerExited(peer, 1, "a worker says so"),
        WorkerExited(me, 0, "a worker says so"),
        WorkerReady(peer, 1, 0, clean=True, reason="a worker says so"),
    )
    routes = contract.STOP_PATH, contract.STACKS_PATH, "/v1/hosts/localhost:drain"
    before = max(record.step for record in job.steps())
    with client_of(job, files[0]) as worker:
        attempts: list[Callable[[], object]] = [
            *(partial(worker.batch, operation) for operation in operations),
            *(partial(worker.post_json, EVENTS_PATH, documents.encode(each)) for each in events),
            *(partial(worker.post_json, path, b"{}") for path in routes),
            partial(worker.post_json, contract.SCALE_PATH, b'{"num_proc": 1}'),
        ]
        for attempt in attempts:
            with pytest.raises(RequestError, match="403 forbidden"):
                attempt()
        worker.set("rounds/1/mine", b"a key of its round")
        worker.set("mine/note", b"a key of users")
        assert worker.get(contract.JOB_WORLD) is not None
    job.until(
        lambda: all(r.step > before + 20 for r in job.live().values()) and len(job.live()) == 2,
        "both workers train on",
    )
    assert job.rounds() == [2]
    told = [line for line in job.stderr.splitlines() if f"a request of worker {me}" in line]
    assert len(told) == 1, job.stderr
    assert not any(read_token_file(file) in job.stderr for file in files)


def test_readers_look_and_operators_steer(job: RunningJob) -> None:
    with client_of(job, job.run_dir / "token-reader") as reader:
        assert b'"state":"running"' in reader.get_bytes(contract.STATUS_PATH)
        metrics = reader.get_bytes(contract.METRICS_PATH).decode()
        assert "elastic_requests_refused_total" in metrics
        with pytest.raises(RequestError, match="403 forbidden"):
            reader.post_json(contract.STACKS_PATH, b"{}")
        with pytest.raises(RequestError, match="403 forbidden"):
            reader.get("mine/note")
    with client_of(job, job.run_dir / "token-operator") as operator:
        operator.post_json(contract.STACKS_PATH, b"{}")
        with pytest.raises(RequestError, match="403 forbidden"):
            operator.set(contract.JOB_NOTICE, b"")
        operator.set("mine/small", bytes(1000))
        with pytest.raises(RefusedError, match="users' keys have taken all their room"):
            operator.set("mine/large", bytes(20_000))
    endpoint = read_endpoint(job.run_dir)
    assert endpoint is not None
    stranger = RendezvousClient(endpoint.url, "no such token", repeats=False)
    with stranger, pytest.raises(UnauthorizedError):
        stranger.get_bytes(contract.STATUS_PATH)
    with client_of(job, job.run_dir / "token-operator") as operator:
        operator.post_json(contract.STOP_PATH, b"{}")
    assert job.wait() == 143
    job.assert_nothing_left()
