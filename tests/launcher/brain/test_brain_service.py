"""`elasticbrain serve`: its folder, its tokens, its mistakes, and what it knows when it is back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_driver.brain.grants import Grant, JobOver, JobReport, Kind, grant_key, lease_key
from elastic_driver.brain.messages import PublishGrant, WithdrawGrant
from elastic_driver.brain.store.records import Node
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.token_roles import job_token, jobs_token
from launcher.brain.brain_service import AGAIN_S, Promises
from launcher.brain.routes import NAMES
from launcher.brain.statistics_reader import address_of
from launcher.launch.brain_job import brain_client
from rendezvous.auth import bearer, read_credentials, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnauthorizedError, UnreachableError
from rendezvous.routes import JSON
from rendezvous.tls import certificate_in, make_certificate
from tests.support.brain import RunningBrain, elasticbrain
from tests.support.job import ROOT, eventually
from tests.support.squatter import squatting

pytest.importorskip("scipy")
CLIENTS: list[RendezvousClient] = []
pytestmark = pytest.mark.timeout(120)


def report(**says: object) -> JobReport:
    fields = {"began": 5.0, "least": 1, "kind": Kind(name="j", command=""), **says}
    return JobReport(**fields)  # type: ignore[arg-type]


class Job:
    """A job's driver, as the Brain sees it: it keeps its lease and does what a test says."""

    lease = 5.0  # seconds

    def __init__(self, brain: RunningBrain, name: str) -> None:
        self.name = name
        token, known_by = read_credentials(brain.folder / "job.token")
        self.client = client_of(brain, job_token(token, name), known_by)

    def say(self, said: JobReport | JobOver) -> None:
        self.client.set(lease_key(self.name), b"", lease=self.lease)
        self.client.post_json(EVENTS_PATH, msgspec.json.encode(said))

    def grant(self) -> Grant | None:
        entry = self.client.get(grant_key(self.name))
        return None if entry is None else msgspec.json.decode(entry.value, type=Grant)

    def until(self, look: Callable[[Grant], object], again: JobReport) -> Grant:
        """Say the same again and again until the Brain grants this."""

        def found() -> Grant | None:
            self.say(again)
            grant = self.grant()
            return grant if grant is not None and look(grant) else None

        return eventually(found, within=20, what="a grant", context=lambda: str(self.grant()))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Every client of a test is closed at its end."""
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client_of(brain: RunningBrain, token: str, known_by: str) -> RendezvousClient:
    CLIENTS.append(RendezvousClient(brain.url, token, 5.0, fingerprint=known_by))
    return CLIENTS[-1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.brain.command", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_a_job_gets_slots_and_another_one_gets_them_when_it_is_over(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:2") as brain:
        first, second = Job(brain, "first"), Job(brain, "second")
        grant = first.until(lambda g: g.hosts == {"a": 2}, report(least=2))
        second.say(report(least=2))
        holding = report(least=2, carried_out=grant.number, holding={"a": 2})
        first.say(holding)
        assert [job["job"] for job in brain.status()["jobs"]] == ["first", "second"]
        waits = second.grant()
        assert waits is None or not waits.hosts
        first.say(JobOver(began=5.0, exit_code=0))
        later = second.until(lambda g: g.hosts == {"a": 2}, report(least=2))
        assert later.number > grant.number
        assert first.grant() is None, "no run of that name finds it"


def test_what_it_has_granted_is_known_to_the_next_one_that_waits_for_its_jobs(
    tmp_path: Path,
) -> None:
    with elasticbrain(tmp_path, "-H", "a:2") as brain:
        first = Job(brain, "first")
        grant = first.until(lambda g: g.hosts == {"a": 2}, report(least=2))
        brain.kill()
        brain.start_again()
        second = Job(brain, "second")
        second.say(report(least=1))
        jobs = {job["job"]: job for job in brain.status()["jobs"]}
        assert jobs["first"]["granted"] == {"a": 2}
        assert second.grant() is None, "it plans nothing before the first job was heard"
        same = first.until(
            lambda g: True, report(least=2, carried_out=grant.number, holding={"a": 2})
        )
        assert (same.number, same.hosts) == (grant.number, {"a": 2})


# Reports as each of these tokens in turn, as another user of this machine; prints the statuses.
_REPORTS = """
import encodings.idna, http.client, json, os, sys
host, port, path, body, headers = json.load(sys.stdin)
os.setuid(65534)
for each in headers:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("POST", path, body, each)
    print(connection.getresponse().status)
    connection.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_names_without_end_leave_places_for_the_names_of_others(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:2") as brain:
        host, _, port = brain.url.rpartition("//")[2].partition(":")
        token = read_credentials(brain.folder / "job.token").token
        names = [job_token(token, f"fake-{number}") for number in range(200)]
        headers = [{"Authorization": bearer(name), "Content-Type": JSON} for name in names]
        asked = host, int(port), EVENTS_PATH, msgspec.json.encode(report()).decode(), headers
        flood = subprocess.run(
            [sys.executable, "-c", _REPORTS],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        codes = [int(line) for line in flood.stdout.split()]
        assert len(codes) == len(names)
        assert codes.count(202) >= NAMES
        assert codes[-1] == 429
        honest = Job(brain, "honest")
        honest.say(report())  # raises if it is refused


def test_an_administrator_frees_the_slots_of_a_silent_job_and_of_no_other(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:2") as brain:
        where = "--state-dir", str(brain.folder)
        first, second = Job(brain, "first"), Job(brain, "second")
        grant = first.until(lambda g: g.hosts == {"a": 2}, report(least=2))
        holding = report(least=2, carried_out=grant.number, holding={"a": 2})
        first.lease = 30.0
        first.say(holding)
        heard, unknown = run("forget", "first", *where), run("forget", "third", *where)
        assert (heard.returncode, unknown.returncode) == (64, 64)
        assert "the driver of first is heard" in heard.stderr
        assert "there is no job third" in unknown.stderr
        assert len((heard.stderr + unknown.stderr).splitlines()) == 2
        with pytest.raises(RequestError) as refused:
            first.client.post_json("/v1/jobs/second:forget", b"{}")
        assert refused.value.status == 403
        first.lease = 1.0
        first.say(holding)
        state = lambda: brain.status()["jobs"][0]["state"]  # noqa: E731
        eventually(lambda: state() == "silent", within=30, what="its lease ends")
        assert run("forget", "first", *where).returncode == 0
        second.until(lambda g: g.hosts == {"a": 2}, report(least=2))


def test_each_role_has_a_file_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        files = {path.name: path.stat() for path in brain.folder.iterdir()}
        for name in ("admin.token", "job.token", "node.token", "state"):
            assert stat.S_IMODE(files[name].st_mode) == 0o600, name
        assert stat.S_IMODE(brain.folder.stat().st_mode) == 0o700
        before = (brain.folder / "job.token").read_text()
        assert brain.stop() == 130
        brain.start_again()
        assert (brain.folder / "job.token").read_text() == before
        assert before.strip() not in brain.said()


def test_a_job_reads_and_writes_only_itself(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        job = Job(brain, "mine")
        job.say(report())
        for forbidden in (
            lambda: job.client.get(grant_key("other")),
            lambda: job.client.set(lease_key("other"), b"", lease=5.0),
            lambda: job.client.set(grant_key("mine"), b""),
            lambda: job.client.get_bytes("/v1/status"),
        ):
            with pytest.raises(RequestError) as refused:
                forbidden()
            assert refused.value.status == 403
        stranger = client_of(brain, "job:mine:0123", "")
        with pytest.raises(UnauthorizedError):
            stranger.get(grant_key("mine"))
        node = client_of(brain, *read_credentials(brain.folder / "node.token"))
        with pytest.raises(RequestError) as refused:
            node.post_json(EVENTS_PATH, msgspec.json.encode(report()))
        assert refused.value.status == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"type":"job_report"}', 422),
        (msgspec.json.encode(report(least=3, most=2)), 422),
        (msgspec.json.encode(report(least=3)).replace(b'"least":3', b'"least":-1'), 422),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(body: bytes, status: int, tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        with pytest.raises(RequestError) as refused:
            Job(brain, "mine").client.post_json(EVENTS_PATH, body)
        assert refused.value.status == status
        assert brain.status()["jobs"] == []


@pytest.mark.parametrize(
    "name",
    ["esc\x1b]0;x\x07\x1b[2J", "a/b", "../../etc/x", "x" * 65, "<img>", "two words", "good ", "-x"],
)
def test_a_token_of_no_job_s_name_reports_nothing(name: str, tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        address = brain.url.removeprefix("http://")
        jobs = read_credentials(brain.folder / "job.token").token
        refused = posted(address, job_token(jobs, name))
        assert refused.split()[1] in (b"400", b"422"), refused
        assert b" 202 " in posted(address, job_token(jobs, "good")).splitlines()[0]
        assert [job["job"] for job in brain.status()["jobs"]] == ["good"]
        assert name not in brain.said()
        for token in (job_token(jobs, name), job_token(jobs, "good")):
            assert token.rpartition(":")[2] not in brain.said(), "no header is in any line"


def posted(address: str, token: str) -> bytes:
    """Post a report with a token that no client of ours would send; return the answer."""
    body = msgspec.json.encode(report())
    host, _, port = address.rpartition(":")
    head = (
        f"POST {EVENTS_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(head.encode() + body)
        return connection.recv(4096)


def test_many_jobs_that_do_not_exist_hold_no_other_job_up(tmp_path: Path) -> None:
    """One who may start jobs sends 1,500 reports under as many names."""
    with elasticbrain(tmp_path, "-H", "a:2,b:2") as brain:
        honest = Job(brain, "honest")
        before = honest.until(lambda g: g.hosts, report())
        jobs = read_credentials(brain.folder / "job.token").token
        address = brain.url.removeprefix("http://")
        codes = [flooded(address, job_token(jobs, f"fake-{n}")) for n in range(1500)]
        assert codes.count(202) < 200
        assert codes.count(429) > 1300
        began = time.monotonic()
        assert len(brain.status()["jobs"]) < 200
        held = report(held=1, carried_out=before.number, holding=before.hosts)
        honest.until(lambda g: g.number > before.number, held)
        assert time.monotonic() - began < 20, "the Brain goes on planning"
        left = lambda: {job["job"]: job["state"] for job in brain.status()["jobs"]}  # noqa: E731
        eventually(
            lambda: left() == {"honest": "silent"},
            within=60,
            what="jobs that never were are forgotten",
            context=lambda: str(left()) + brain.said()[-1500:],
        )


def flooded(address: str, token: str) -> int:
    return int(posted(address, token).split()[1])


def test_a_brain_that_lost_its_state_knows_by_receipts_what_its_jobs_have(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:2") as brain:
        first = Job(brain, "first")
        grant = first.until(lambda g: g.hosts == {"a": 2}, report(least=2))
        brain.kill()
        (brain.folder / "state").unlink()
        brain.start_again()
        thief, second = Job(brain, "thief"), Job(brain, "second")
        has = {"carried_out": grant.number, "holding": grant.hosts}
        first.say(report(least=2, receipt=grant.receipt, **has))
        thief.say(report(receipt=grant.receipt, **has))
        second.say(report())

        def all_three() -> dict[str, dict[str, object]] | None:
            found = {job["job"]: job for job in brain.status()["jobs"]}
            return found if len(found) == 3 else None

        jobs = eventually(all_three, within=30, what="all jobs are known")
        assert (jobs["first"]["granted"], jobs["first"]["holding"]) == ({"a": 2}, {"a": 2})
        assert (jobs["thief"]["granted"], jobs["thief"]["holding"]) == ({}, {})
        assert "thief: it says that it holds 2 slots more than this Brain" in brain.said()
        later = first.until(lambda g: g.number > grant.number, report(held=1, **has))
        assert later.hosts == {"a": 1}


def test_hosts_that_come_are_given_and_hosts_that_go_are_not(tmp_path: Path) -> None:
    listed = tmp_path / "hosts"
    listed.write_text("a:1\n")
    with elasticbrain(tmp_path, "--hostfile", str(listed)) as brain:
        job = Job(brain, "mine")
        job.until(lambda g: g.hosts == {"a": 1}, report())
        listed.write_text("b:2\n")
        job.until(lambda g: set(g.hosts) == {"b"}, report())


def test_beyond_this_machine_it_speaks_tls_only(tmp_path: Path) -> None:
    words = "serve", "-H", "a:1", "--bind", "0.0.0.0:0", "--state-dir", str(tmp_path / "brain")
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.brain.command", *words],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:

        def url() -> str:
            found = tmp_path / "brain" / "endpoint"
            return found.read_text().split()[1] if found.exists() else ""

        address = eventually(url, within=30, what="an address")
        assert address.startswith("https://")
        token, known_by = read_credentials(tmp_path / "brain" / "job.token")
        assert known_by.startswith("sha256:")
        with RendezvousClient(address, job_token(token, "j"), 5.0, fingerprint=known_by) as own:
            assert own.get(grant_key("j")) is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


def test_on_loopback_it_is_known_by_its_certificate_and_answers_plain_requests_too(
    tmp_path: Path,
) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        assert brain.url.startswith("http://127.0.0.1:")
        files = [brain.folder / f"{name}.token" for name in ("admin", "job", "node")]
        first = [read_credentials(file) for file in files]
        known_by = certificate_in(brain.folder).fingerprint()
        assert {each.fingerprint for each in first} == {known_by}
        own = Job(brain, "mine")
        assert own.grant() is None
        assert own.client.peer_fingerprint == known_by
        plain = client_of(brain, job_token(first[1].token, "mine"), "")
        assert plain.get(grant_key("mine")) is None
        brain.kill()
        brain.start_again()
        assert [read_credentials(file) for file in files] == first
        assert own.grant() is None, "its jobs know it as before"


def test_a_brain_of_an_older_version_gets_a_certificate_and_its_jobs_go_on_in_plain(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "brain"
    folder.mkdir(0o700)
    write_token_file(folder / "admin.token", "of-an-older-version")
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        token, known_by = read_credentials(brain.folder / "job.token")
        assert known_by == certificate_in(brain.folder).fingerprint()
        own = job_token(jobs_token("of-an-older-version"), "mine")
        assert own == job_token(token, "mine")
        assert client_of(brain, own, "").get(grant_key("mine")) is None


@pytest.mark.parametrize("with_tls", [False, True])
def test_another_program_at_the_port_of_a_brain_that_has_died_is_told_nothing(
    tmp_path: Path, with_tls: bool
) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        job = Job(brain, "mine")
        job.until(lambda g: g.hosts == {"a": 1}, report())
        brain.kill()
        context = None
        if with_tls:
            other = certificate_in(tmp_path)
            make_certificate(other)
            context = other.context()
        token_file = str(brain.folder / "job.token")
        with squatting(int(brain.url.rpartition(":")[2]), context) as squatter:
            why = "certificate of another server" if with_tls else "it speaks no TLS"
            with brain_client(brain.url, token_file, "mine") as client:
                client.timeout = 3.0
                with pytest.raises(UnreachableError, match=why):
                    client.set(lease_key("mine"), b"", lease=5.0)
            for words in (("status",), ("forget", "mine")):
                asked = run(*words, "--state-dir", str(brain.folder))
                assert asked.returncode == 75
                assert re.search(f"does not answer .*{why}", asked.stderr)
                assert len(asked.stderr.splitlines()) == 1
        assert len(squatter.heard) > 2
        for word in (b"Bearer", b"HTTP", b"mine"):
            assert word not in b"".join(squatter.heard)
        brain.start_again()
        job.until(lambda g: g.hosts == {"a": 1}, report())


def test_a_folder_serves_one_brain(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        other = run("serve", "-H", "a:1", "--bind", "127.0.0.1:0", "--state-dir", str(brain.folder))
        assert other.returncode == 75
        assert "another Brain uses the folder" in other.stderr
        port = brain.url.rpartition(":")[2]
        elsewhere = "--state-dir", str(tmp_path / "other")
        taken = run("serve", "-H", "a:1", "--bind", f"127.0.0.1:{port}", *elsewhere)
        assert taken.returncode == 75
        assert "another program listens there" in taken.stderr
        assert len(taken.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve",), "one of the arguments -H/--hosts --hostfile"),
        (("serve", "-H", "a:x"), "'x' is not a number of slots"),
        (("serve", "-H", "a:1", "--bind", "nowhere:x"), "--bind"),
        (("serve", "-H", "a:1", "--slots-per-host", "0"), "--slots-per-host"),
        (("serve", "--hostfile", "/nowhere/hosts"), "/nowhere/hosts"),
        (("serve", "-H", "a:1", "--algorithm", "magic"), "magic"),
        (("serve", "-H", "a:1", "--tls-cert", "x.pem"), "--tls-cert and --tls-key belong together"),
        (("serve", "-H", "a:1", "--insecure"), "--insecure"),
        ((), "COMMAND"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    where = ("--state-dir", str(tmp_path / "brain")) if words else ()
    found = run(*words, *where)
    assert (found.returncode, said in found.stderr) == (64, True), found.stderr
    assert len(found.stderr.strip().splitlines()) == 1, found.stderr


def test_a_state_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "brain"
    folder.mkdir(mode=0o700)
    (folder / "state").write_bytes(b"\xff\xff")
    found = run("serve", "-H", "a:1", "--state-dir", str(folder))
    assert found.returncode == 64
    assert "state is damaged" in found.stderr


def test_the_status_shows_hosts_jobs_and_reasons_and_says_where_no_brain_is(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1,b:2") as brain:
        job = Job(brain, "night")
        job.lease = 30.0
        job.until(lambda g: g.hosts, report(most=1))
        shown = run("status", "--state-dir", str(brain.folder)).stdout
        assert "HOST  SLOTS  GRANTED" in shown
        assert "JOB    STATE  WEIGHT  LIMITS  SLOTS  WHERE  STEP TIMES  WHY" in shown
        assert "night  live   1       1 to 1  1" in shown
        assert "its part of 3 slots (weight 1 of 1) is 3; with 1 worker it counts 1;" in shown
        document = json.loads(run("status", "--json", "--state-dir", str(brain.folder)).stdout)
        assert [host["slots"] for host in document["hosts"]] == [1, 2]
    away = run("status", "--state-dir", str(tmp_path / "none"))
    assert away.returncode == 75
    assert "no Brain runs in" in away.stderr


def test_a_brain_that_was_killed_is_told_in_one_line(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        brain.kill()
        away = run("status", "--state-dir", str(brain.folder))
    assert away.returncode == 75
    assert "does not answer" in away.stderr
    assert "elasticbrain serve --state-dir" in away.stderr
    assert len(away.stderr.splitlines()) == 1


def test_it_does_not_grant_what_it_cannot_write_down(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        hurdle = brain.folder / "state.new"
        eventually(lambda: not hurdle.exists(), within=10, what="nothing is being written")
        hurdle.mkdir()  # as unwritable as a full disk
        job = Job(brain, "mine")
        job.say(report())
        eventually(lambda: "cannot be written" in brain.said(), within=20, what="a line about it")
        assert job.grant() is None
        hurdle.rmdir()
        job.until(lambda g: g.hosts == {"a": 1}, report())
        assert "is written again" in brain.said()


def test_it_does_not_withdraw_what_it_cannot_write_down(tmp_path: Path) -> None:
    with elasticbrain(tmp_path, "-H", "a:1") as brain:
        job = Job(brain, "mine")
        grant = job.until(lambda g: g.hosts == {"a": 1}, report())
        hurdle = brain.folder / "state.new"

        def is_there() -> bool:
            with contextlib.suppress(FileExistsError):  # the state is being written
                hurdle.mkdir()
            return hurdle.is_dir()

        eventually(is_there, within=10, what="the state cannot be written")
        job.say(JobOver(began=5.0, exit_code=0))
        eventually(lambda: not brain.status()["jobs"], within=20, what="the job is over")
        assert job.grant() == grant
        eventually(lambda: "cannot be written" in brain.said(), within=20, what="a line about it")
        assert job.grant() == grant
        hurdle.rmdir()
        eventually(lambda: job.grant() is None, within=20, what="the grant is withdrawn")


def test_grants_are_published_and_withdrawn_once_the_disk_has_the_state() -> None:
    disk, did = [False, False, True, True], list[str]()

    def save() -> bool:
        written = disk.pop(0)
        did.append("written" if written else "failed")
        return written

    promises = Promises(save, lambda decision: did.append(f"{type(decision).__name__}"))
    promises.add(WithdrawGrant("mine", "it is over"))
    promises.add(PublishGrant("other", Grant(number=1, hosts={}, reason=""), {}, ""))
    promises.note_change(100.0, soon=True)
    assert promises.due == 100.0
    promises.keep(100.0)
    assert promises.due == 100.0 + AGAIN_S
    promises.keep(promises.due)
    assert did == ["failed", "failed"], "a Brain that dies now has promised nothing"
    promises.keep(103.0)
    assert did == ["failed", "failed", "written", "WithdrawGrant", "PublishGrant"]
    promises.keep(104.0)
    assert did[5:] == ["written"], "each is carried out once"


def test_a_host_that_others_keep_busy_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from elastic_driver.brain.store.database import Database

    database = Database(address_of(str(tmp_path / "stats.db"), new=True))
    with contextlib.closing(database):
        database.open()
        database.put_nodes([Node("a", time.time(), slots=1, cpu=0.99), Node("b", time.time(), 1)])
        stats = "--stats-db", str(tmp_path / "stats.db")
        with elasticbrain(tmp_path, "-H", "a:1,b:1", *stats) as brain:
            eventually(lambda: brain.status()["measured"] == ["a", "b"], within=20, what="figures")
            job = Job(brain, "mine")
            assert job.until(lambda g: g.hosts, report()).hosts == {"b": 1}
