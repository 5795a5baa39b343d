"""The driver's routes over real HTTP, with a driver that only notes what it is given."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from elastic_driver import token_roles
from elastic_driver.runtime.api import DriverRoutes, job_access
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.event_routes import may_report
from elastic_driver.runtime.machine_api import Request
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.progress import History
from elastic_driver.words.wire_events import (
    AgentReturned,
    DrainCancelled,
    DrainRequested,
    RunningWorker,
    ScaleRequested,
    WorkerReady,
    WorkerStarted,
)
from rendezvous.auth import Caller, operator_token
from rendezvous.server import RendezvousServer
from tests.runtime.waiting import until

TOKEN = "secret"


class NotingDriver:
    """Keeps what is posted; answers for its status at once."""

    def __init__(self) -> None:
        self.posted: list[Request] = []
        self.stops: list[tuple[str, int]] = []
        self.accepting = self.reading = True
        self.hosts = [
            {"host": "a", "state": "usable"},
            {"host": "b", "state": "drained"},
            {"host": "c", "state": "removed"},
        ]
        self.size_bounds: tuple[int, int | None] = (2, 8)

    def post(self, event: Request) -> bool:
        if self.accepting:
            self.posted.append(event)
        return self.accepting

    def deliver(self, event: Request, acknowledge: Callable[[], None]) -> bool:
        taken = self.post(event)
        if taken and self.reading:
            acknowledge()  # the callers are on the server's loop
        return taken

    def request_stop(self, reason: str, exit_code: int) -> None:
        self.stops.append((reason, exit_code))

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        reply(json.dumps({"state": "running", "hosts": self.hosts}).encode())

    def history(self, since: float) -> History:
        moments = [moment for moment in (10.5, 11.5) if moment > since]
        return History(t=moments, step=[int(moment) for moment in moments])


class Api:
    """A server with the driver's routes, and a way to call it."""

    def __init__(self) -> None:
        self.driver = NotingDriver()
        self.log = EventLog(None, clock=lambda: 1.0, on_broken=lambda _: None)
        self.server = RendezvousServer(
            token=TOKEN, access=job_access(), routes=DriverRoutes(self.driver, self.log).add_to
        )

    def open(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        all_headers = {"Authorization": f"Bearer {TOKEN}", **headers}
        connection.request(method, path, body, all_headers)
        return connection, connection.getresponse()

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        connection, response = self.open(method, path, body, **headers)
        try:
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@pytest.fixture
def api() -> Iterator[Api]:
    subject = Api()
    with subject.server:
        yield subject
        subject.log.close()


@pytest.fixture
def few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_driver.runtime.event_routes.MOST_MAIL", 16)


def test_one_worker_fills_its_share_of_the_mailbox_and_no_more(few_events: None, api: Api) -> None:
    """The driver's thread does not read for a while, and a worker reports without end."""
    api.driver.reading = False
    agents = agent_token(TOKEN, "a")

    def report(number: int) -> int:
        name = f"a.{number}.1"
        body = msgspec.json.encode(WorkerReady(name, 1, 0, clean=True, reason="again and again"))
        token = f"Bearer {worker_token(agents, name)}"
        connection = http.client.HTTPConnection("127.0.0.1", api.server.port, timeout=0.5)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/events", body, {"Authorization": token})
            try:
                answer = connection.getresponse()
            except TimeoutError:
                return 0  # it waits
            answer.read()
            return answer.status

    assert [report(0) for _ in range(5)] == [0, 0, 0, 0, 503]
    assert [report(1) for _ in range(5)] == [0, 0, 0, 0, 503]
    assert len(api.driver.posted) == 8
    operator = f"Bearer {operator_token(TOKEN)}"
    api.driver.reading = True
    assert api.call("POST", "/v1/scale", b'{"num_proc": 3}', Authorization=operator)[0] == 202


def test_a_typed_event_goes_into_the_mailbox(api: Api) -> None:
    body = msgspec.json.encode(WorkerStarted("a.0.1", 4711))
    assert api.call("POST", "/v1/events", body) == (202, {"accepted": True})
    assert api.driver.posted == [WorkerStarted("a.0.1", 4711)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"not json", 400),
        (b"", 400),
        (b"[]", 422),
        (b'{"type":"stop_requested","reason":"","exit_code":0}', 422),  # not one of the wire's
        (b'{"type":"worker_started","worker":"a.0.1"}', 422),
        (b'{"type":"worker_started","worker":"a.0.1","pid":-1}', 422),
        (b'{"type":"worker_started","worker":"a.0.1","pid":1,"more":1}', 422),
        (b'{"type":"worker_exited","worker":"a.0.1","exit_code":999,"log_tail":""}', 422),
    ],
)
def test_what_is_no_event_of_the_wire_is_refused_with_a_reason(
    api: Api, body: bytes, status: int
) -> None:
    found, answer = api.call("POST", "/v1/events", body)
    assert found == status
    assert answer["error"]["code"]
    assert answer["error"]["message"]
    assert api.driver.posted == []


def test_a_driver_that_takes_no_events_says_to_come_back(api: Api) -> None:
    api.driver.accepting = False
    body = msgspec.json.encode(WorkerStarted("a.0.1", 4711))
    status, answer = api.call("POST", "/v1/events", body)
    assert status == 503
    assert answer["error"]["code"] == "not_accepting"


@pytest.mark.parametrize("path", ["/v1/events", "/v1/status", "/v1/scale"])
def test_without_the_token_there_is_no_answer(api: Api, path: str) -> None:
    status, _ = api.call("GET", path, Authorization="Bearer wrong")
    assert status == 401


def test_scaling_is_bounded_by_the_job_s_sizes(api: Api) -> None:
    assert api.call("POST", "/v1/scale", b'{"num_proc":8}')[0] == 202
    assert api.driver.posted == [ScaleRequested(8)]
    status, answer = api.call("POST", "/v1/scale", b'{"num_proc":9}')
    assert status == 422
    assert "--max-np" in answer["error"]["hint"]
    status, answer = api.call("POST", "/v1/scale", b'{"num_proc":1}')
    assert status == 422
    assert "--min-np" in answer["error"]["hint"]
    assert api.call("POST", "/v1/scale", b'{"num_proc":"3"}')[0] == 422
    assert api.call("POST", "/v1/scale", b'{"num_proc":0}')[0] == 422
    api.driver.size_bounds = (1, None)
    assert api.call("POST", "/v1/scale", b'{"num_proc":100}')[0] == 202


def test_the_status_is_what_the_driver_answers(api: Api) -> None:
    status, answer = api.call("GET", "/v1/status")
    assert (status, answer["state"]) == (200, "running")


def test_a_host_is_drained_with_or_without_a_reason_and_a_deadline(api: Api) -> None:
    assert api.call("POST", "/v1/hosts/a:drain")[0] == 202
    body = b'{"reason":"new disks","deadline":60}'
    assert api.call("POST", "/v1/hosts/b:drain", body)[0] == 202
    assert api.driver.posted == [
        DrainRequested("a", "a user asked for it", None),
        DrainRequested("b", "new disks", 60.0),
    ]


@pytest.mark.parametrize("host", ["z", "c", "a%20b"])
def test_a_host_that_is_not_there_cannot_be_drained(api: Api, host: str) -> None:
    status, answer = api.call("POST", f"/v1/hosts/{host}:drain")
    assert (status, answer["error"]["code"]) == (404, "unknown_host")
    assert answer["error"]["hint"] == "it knows a, b"
    assert api.driver.posted == []


@pytest.mark.parametrize("body", [b'{"deadline":-1}', b'{"reason":""}', b'{"more":1}', b"[]"])
def test_a_drain_of_another_form_is_refused(api: Api, body: bytes) -> None:
    assert api.call("POST", "/v1/hosts/a:drain", body)[0] == 422
    assert api.driver.posted == []


def test_only_a_drained_host_is_given_back(api: Api) -> None:
    assert api.call("POST", "/v1/hosts/b:undrain", b'{"reason":"repaired"}')[0] == 202
    assert api.driver.posted == [DrainCancelled("b", "repaired")]
    status, answer = api.call("POST", "/v1/hosts/a:undrain")
    assert (status, answer["error"]["code"]) == (409, "not_drained")
    assert api.call("POST", "/v1/hosts/z:undrain")[0] == 404


def test_a_stop_ends_the_job_with_143_and_says_why(api: Api) -> None:
    assert api.call("POST", "/v1/stop", b'{"reason":"enough"}') == (202, {"accepted": True})
    assert api.driver.stops == [("told to stop: enough", 143)]


def test_a_driver_that_does_not_answer_is_a_503_in_bounded_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_driver.runtime.status_routes.STATUS_WAIT_S", 0.1)
    monkeypatch.setattr(api.driver, "ask_status", lambda _reply: None)
    status, answer = api.call("GET", "/v1/status")
    assert (status, answer["error"]["code"]) == (503, "busy")


def test_events_are_listed_from_a_number_on(api: Api) -> None:
    for name in ("job_started", "round_opened"):
        api.log.append(name)
    status, answer = api.call("GET", "/v1/events")
    assert status == 200
    assert [event["event"] for event in answer["events"]] == ["job_started", "round_opened"]
    assert answer["last"] == 2
    assert api.call("GET", "/v1/events?since=2") == (200, {"events": [], "last": 2})
    assert api.call("GET", "/v1/events?since=-1")[0] == 422
    assert api.call("GET", "/v1/events?since=x")[0] == 422


def test_a_stream_tells_what_was_and_what_follows_until_the_end(api: Api) -> None:
    api.log.append("job_started")
    connection, response = api.open("GET", "/v1/events", Accept="text/event-stream")
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    assert response.readline() == b"id: 1\n"
    assert json.loads(response.readline().removeprefix(b"data: "))["event"] == "job_started"
    assert response.readline() == b"\n"
    api.log.append("job_succeeded")
    assert response.readline() == b"id: 2\n"
    api.log.close()
    assert b"job_succeeded" in response.read()
    connection.close()


def test_a_stream_resumes_after_the_last_event_a_reader_has_seen(api: Api) -> None:
    for _ in range(3):
        api.log.append("worker_ready")
    connection, response = api.open(
        "GET", "/v1/events", **{"Accept": "text/event-stream", "Last-Event-ID": "2"}
    )
    assert response.readline() == b"id: 3\n"
    connection.close()


@pytest.fixture
def one_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_driver.runtime.status_routes.MAX_STREAMS", 1)


def test_readers_that_leave_are_forgotten_and_too_many_are_refused(
    one_stream_only: None, api: Api
) -> None:
    connection, response = api.open("GET", "/v1/events", Accept="text/event-stream")
    assert response.status == 200
    status, answer = api.call("GET", "/v1/events", Accept="text/event-stream")
    assert (status, answer["error"]["code"]) == (503, "too_many_streams")
    response.close()
    connection.close()

    def let_in() -> bool:
        again, reply = api.open("GET", "/v1/events", Accept="text/event-stream")
        reply.close()
        again.close()
        return reply.status == 200

    until(let_in, "the place of a reader that left is free")


def test_the_history_begins_after_the_time_that_was_asked_for(api: Api) -> None:
    status, answer = api.call("GET", "/v1/history")
    assert (status, answer["t"], answer["step"]) == (200, [10.5, 11.5], [10, 11])
    assert api.call("GET", "/v1/history?since=10.5")[1]["t"] == [11.5]
    for wrong in ("x", "-1", "nan", "1e99"):
        assert api.call("GET", f"/v1/history?since={wrong}")[0] == 422


def test_an_agent_returns_with_workers_of_its_own_host_only() -> None:
    def returned(*workers: str) -> AgentReturned:
        running = tuple(RunningWorker(worker, 7) for worker in workers)
        return AgentReturned("a", 1, 1, "x", (5000,), term=2, workers=running)

    agent = Caller(token_roles.AGENT, "a")
    assert may_report(agent, returned("a.0.1", "a.1.2"))
    assert may_report(agent, returned())
    assert not may_report(agent, returned("a.0.1", "b.0.1"))
    assert not may_report(Caller(token_roles.AGENT, "b"), returned("b.0.1"))
