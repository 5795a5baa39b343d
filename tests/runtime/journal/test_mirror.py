"""The journal in a real etcd of three members: one driver writes it, and another one goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.errors import TakenOverError
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import Tick
from elastic_driver.runtime.journal import follower as mirror
from elastic_driver.runtime.journal.etcd import EtcdClient, _Stream
from elastic_driver.runtime.journal.follower import Ended, EtcdStore, Follower, RunState
from elastic_driver.runtime.journal.journal_file import Head, SqliteStore
from elastic_driver.runtime.journal.replay import Replay
from elastic_driver.runtime.journal.tenure import Tenure, new_key
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.run_dir import RunDir
from rendezvous.auth import write_token_file
from rendezvous.tls import certificate_in, make_certificate
from tests.runtime.jobs import StartJob
from tests.runtime.waiting import until
from tests.support.etcd import EtcdCluster, why_not
from tests.support.ports import free_ports

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

LEASE_S = 2
A0, A1 = "a.0.1", "a.1.1"
DRIVERS: list[Driver] = []
STATES = {"tf": TfCluster(30.0).snapshot()}


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), free_ports(6)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    while DRIVERS:
        DRIVERS.pop().quit()


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("_", "-")[-60:]


class Driver:
    """The journal's side of a driver, in a folder of its own."""

    def __init__(
        self,
        etcd: EtcdCluster,
        run_id: str,
        folder: Path,
        found: RunState | None = None,
        lease_s: int = LEASE_S,
    ):
        folder.mkdir(exist_ok=True)
        self.path, self.run_id = folder / "journal.db", run_id
        self.client = EtcdClient(etcd.access)
        self.said: list[str] = []
        self.lost: list[TakenOverError] = []
        self.n = 0
        if found is not None:
            replay = Replay(self.path)
            self.n = max([0, *(step.n for step in replay.steps())])
            replay.close()
        self.at = time.monotonic()
        self.term = 1 if found is None else found.term + 1
        self.tenure = Tenure(self.client, run_id, new_key(self.term, self.n, self.at), lease_s)
        token_file = folder / "token"
        if not token_file.exists():
            write_token_file(token_file, "secret")
        self.store = EtcdStore(
            self.client, self.tenure, SqliteStore(self.path), token_file, self.said.append
        )
        self.store.on_taken_over = self.lost.append
        self.journal = Journal(self.path, run_id, store=self.store, on_taken_over=self.lost.append)
        DRIVERS.append(self)

    def begin(self) -> Driver:
        """Take the run, and begin to write."""
        self.tenure.take(*(mirror.begin_anew(self.tenure.keys) if self.term == 1 else ()))
        self.store.start()
        self.journal.open(Head(self.run_id, ("-np", "2"), "/w", self.term, self.n, self.at, 1.0))
        self.journal.await_open()
        if self.term == 1:
            self.snapshot()
        return self

    def note(self, count: int) -> Driver:
        """Write events, each on its own."""
        for _ in range(count):
            self.n += 1
            self.journal.note(self.n, float(self.n), "tf", Tick())
            self.journal.flush()
        self.written()
        return self

    def snapshot(self) -> None:
        self.journal.snapshot(self.n, float(self.n), STATES)
        self.written()

    def written(self) -> None:
        until(self.journal._has_settled, "the writer has caught up")

    def die(self) -> None:
        """Write nothing more and let the lease run out, as a host without power does."""
        self.tenure.stop(release=False)

    def quit(self) -> None:
        """Free what a process frees by its end."""
        self.store.stop()
        self.tenure.stop(release=False)
        self.journal.close()
        self.store.free()

    def end(self, ended: Ended | None = None) -> None:
        if ended is not None:
            self.journal.job_ended(ended.exit_code, ended.reason)
        self.journal.close()


def revoke(driver: Driver) -> None:
    with driver.client.clone() as client:
        client.revoke(driver.tenure._lease)


def follow(etcd: EtcdCluster, run_id: str, folder: Path) -> Follower:
    folder.mkdir(exist_ok=True)
    client = EtcdClient(etcd.access)
    return Follower(client, run_id, folder / "journal.db", folder / "token")


def events(path: Path) -> list[int]:
    replay = Replay(path)
    try:
        return [step.n for step in replay.steps()]
    finally:
        replay.close()


def without_driver(follower: Follower) -> RunState:
    """The state of the run once its driver's lease is over."""
    found: list[RunState] = []

    def looked() -> bool:
        state = follower.copy()
        if state is not None and state.driver is None:
            found.append(state)
        return bool(found)

    until(looked, "the driver's key is gone", LEASE_S + 5)
    return found[0]


def test_a_run_that_nobody_has_begun_is_not_there(etcd: EtcdCluster, tmp_path: Path) -> None:
    with follow(etcd, "nobody", tmp_path) as follower:
        assert follower.copy() is None


def test_a_standby_has_every_event_when_the_drivers_lease_is_over(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    (tmp_path / "a").mkdir()
    certificate = certificate_in(tmp_path / "a")
    make_certificate(certificate)
    token_file = write_token_file(tmp_path / "a/token", "secret", certificate.fingerprint())
    first = Driver(etcd, run_id, tmp_path / "a").begin().note(20)
    with follow(etcd, run_id, tmp_path / "b") as follower:
        state = follower.copy()
        assert state is not None
        assert state.driver is not None
        assert (state.term, state.driver.term, state.is_copied) == (1, 1, True)
        assert events(tmp_path / "b/journal.db") == list(range(1, 21))
        first.note(5)
        large = {f"own/{n}": bytes(300_000) for n in range(5)}
        first.journal.keep({"own/a": b"1", "own/b": b"2", **large})
        first.journal.keep({"own/a": None, "own/c": bytes(2 << 20)})
        first.journal.flush()
        first.written()
        assert first.said == ["the key 'own/c' is not kept in etcd: it is larger than 1 MiB"]
        first.die()
        state = without_driver(follower)
    assert events(tmp_path / "b/journal.db") == list(range(1, 26))
    assert (tmp_path / "b/token").read_text() == token_file.read_text()
    assert certificate_in(tmp_path / "b").text() == certificate.text()
    second = Driver(etcd, run_id, tmp_path / "b", state).begin().note(5)
    replay = Replay(tmp_path / "b/journal.db")
    assert [(t.term, t.n) for t in replay.terms] == [(1, 0), (2, 25)]
    assert replay.keys() == {"own/b": b"2", **large}
    assert (replay.run_id, replay.argv, replay.cwd) == (run_id, ("-np", "2"), "/w")
    replay.close()
    second.end(Ended(3, "because", 0.0))
    assert first.client.range(first.tenure.keys.tls) == ()
    with follow(etcd, run_id, tmp_path / "c") as late:
        state = late.copy()
    assert state is not None
    assert state.end is not None
    assert (state.end.exit_code, state.end.reason) == (3, "because")
    first.end()


def test_one_of_many_standbys_gets_the_run(etcd: EtcdCluster, tmp_path: Path, run_id: str) -> None:
    first = Driver(etcd, run_id, tmp_path / "a").begin().note(3)
    first.die()
    standbys = []
    for name in "bcdef":
        with follow(etcd, run_id, tmp_path / name) as follower:
            state = without_driver(follower)
        standbys.append(Driver(etcd, run_id, tmp_path / name, state))
    outcomes: list[str] = []

    def race(driver: Driver) -> None:
        start.wait()
        try:
            driver.tenure.take()
            outcomes.append("won")
        except TakenOverError as error:
            outcomes.append(str(error))

    start = threading.Barrier(len(standbys))
    threads = [threading.Thread(target=race, args=(driver,)) for driver in standbys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("won") == 1
    assert sum("goes on with this run; driver 2 ends" in each for each in outcomes) == 4
    for driver in (first, *standbys):
        driver.end()


def test_a_driver_that_was_replaced_writes_nothing_more(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    first = Driver(etcd, run_id, tmp_path / "a").begin().note(3)
    first.die()
    with follow(etcd, run_id, tmp_path / "b") as follower:
        second = Driver(etcd, run_id, tmp_path / "b", without_driver(follower)).begin()
    first.n += 1
    first.journal.note(first.n, 1.0, "tf", Tick())
    with pytest.raises(TakenOverError, match=r"driver 2 .* goes on with this run; driver 1 ends"):
        until(lambda: bool(first.journal.settle()), "the writer has seen it")
    until(lambda: len(first.lost) == 1, "it is told")
    second.note(1)
    assert events(tmp_path / "a/journal.db") == [1, 2, 3]
    assert events(tmp_path / "b/journal.db") == [1, 2, 3, 4]
    second.end()


def test_a_driver_that_has_nothing_to_write_hears_of_its_successor(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    first = Driver(etcd, run_id, tmp_path / "a").begin()
    revoke(first)  # as if it had been cut off for long
    with follow(etcd, run_id, tmp_path / "b") as follower:
        second = Driver(etcd, run_id, tmp_path / "b", without_driver(follower)).begin()
    until(lambda: bool(first.lost), "it is told")
    second.end()
    first.end()


def test_a_lease_that_was_lost_is_taken_again_if_nobody_else_has_the_run(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    first = Driver(etcd, run_id, tmp_path / "a").begin()
    revoke(first)
    first.note(3)
    with follow(etcd, run_id, tmp_path / "b") as follower:
        state = follower.copy()
    assert state is not None
    assert state.driver is not None
    assert state.term == state.driver.term == 1
    first.end()


def test_the_lease_in_etcd_leaves_a_standby_time_to_take_over(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    first = Driver(etcd, run_id, tmp_path / "a", lease_s=6).begin()
    with first.client.clone() as client:
        asked = {"ID": first.tenure._lease}
        answer = client._call("/v3/lease/keepalive", asked, _Stream)
    assert answer.result.TTL == 5
    first.end()


def test_snapshots_bound_what_etcd_keeps_and_large_values_are_cut(
    etcd: EtcdCluster, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MAX_VALUE", 10)
    first = Driver(etcd, run_id, tmp_path / "a").begin()
    for _ in range(4):
        first.note(3)
        first.snapshot()
    first.note(2)
    keys = first.tenure.keys
    client = first.client
    numbers = {
        int(found.key.decode().rsplit("/", 3)[1])
        for found in client.range(keys.events, keys.prefix + "f")
    }
    assert min(numbers) > 9 - 1
    snapshots = client.range(keys.snapshots, keys.prefix + "t")
    assert {int(found.key.decode().rsplit("/", 3)[1]) for found in snapshots} == {9, 12}
    with follow(etcd, run_id, tmp_path / "b") as follower:
        follower.copy()
        assert events(tmp_path / "b/journal.db") == [13, 14]
        first.note(1)
        first.snapshot()
        first.note(1)
        follower.copy()
    assert events(tmp_path / "b/journal.db") == [13, 14, 15, 16]
    first.end()
    with follow(etcd, run_id, tmp_path / "a") as again:  # the driver's own copy is gone on with
        again.copy()
    assert events(tmp_path / "a/journal.db") == list(range(1, 17))


def test_a_copy_of_another_run_of_the_same_name_is_made_anew(
    etcd: EtcdCluster, tmp_path: Path, run_id: str
) -> None:
    first = Driver(etcd, run_id, tmp_path / "a").begin().note(9)
    with follow(etcd, run_id, tmp_path / "b") as follower:
        follower.copy()
        first.end(Ended(0, "done", 0.0))
        second = Driver(etcd, run_id, tmp_path / "c")
        second.begin().note(4)
        follower.copy()
        assert events(tmp_path / "b/journal.db") == [1, 2, 3, 4]
    second.end()


def test_members_that_die_hold_the_journal_up_and_nothing_is_lost(
    tmp_path: Path, run_id: str
) -> None:
    with EtcdCluster(tmp_path, free_ports(6)) as etcd:
        first = Driver(etcd, run_id, tmp_path / "a").begin().note(3)
        etcd.kill(0)
        first.note(3)  # two of three answer
        etcd.kill(1)
        etcd.kill(2)
        first.n += 1
        first.journal.note(first.n, 1.0, "tf", Tick())
        first.journal.flush()
        until(lambda: first.store.trouble != "", "it is said", timeout=10)
        assert "does not answer" in first.store.trouble
        assert not first.journal._has_settled()
        for member in range(3):
            etcd.start(member)
        until(first.journal._has_settled, "the writer has caught up", timeout=20)
        assert first.store.trouble == ""
        first.note(1)
        with follow(etcd, run_id, tmp_path / "b") as follower:
            follower.copy()
        assert events(tmp_path / "b/journal.db") == list(range(1, 9))
        assert events(tmp_path / "a/journal.db") == list(range(1, 9))
        assert first.lost == []
        first.end()


# ---- a whole driver ----------------------------------------------------------------------


def test_while_etcd_is_away_nothing_changes_and_the_status_goes_on(
    tmp_path: Path, start_job: StartJob, run_id: str
) -> None:
    def make(run_dir: RunDir) -> EtcdStore:
        client = EtcdClient(etcd.access)
        tenure = Tenure(client, run_id, new_key(1, 0, 0.0), LEASE_S)
        tenure.take(*mirror.begin_anew(tenure.keys))
        local = SqliteStore(run_dir.journal_file)
        store = EtcdStore(client, tenure, local, run_dir.token_file, print)
        store.start()
        return store

    with EtcdCluster(tmp_path, free_ports(6)) as etcd:
        job = start_job(store=make, min_np=1)
        cluster = job.cluster
        cluster.until_workers(A0, A1)
        cluster.ready(A0, A1)
        cluster.world(1)
        etcd.kill(0)
        etcd.kill(1)
        exits = threading.Thread(target=cluster.exits, args=(A1, 1), kwargs={"deadline": 60.0})
        exits.start()
        cluster.until_event("journal_unreachable")
        assert cluster.status()["run_id"] == "run"
        names = [event["event"] for event in cluster.events()]
        assert "worker_exited" not in names
        assert names.count("journal_unreachable") == 1
        assert exits.is_alive()  # its event has no answer yet
        etcd.start(0)
        cluster.until_event("journal_reachable")
        exits.join(30.0)
        assert not exits.is_alive()
        cluster.until_event("worker_exited", worker=A1)
        until(lambda: len(cluster.workers()) == 2, "another worker is started")
        job.driver.request_stop("the test is over", 143)
        assert job.outcome().exit_code == 143
    stderr = job.stderr.getvalue()
    assert stderr.count("membership changes wait for it") == 1
    assert stderr.count("membership changes go on") == 1
