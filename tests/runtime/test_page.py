"""The page's routes over real HTTP: its files, logins, sessions, and the live stream."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.core.events import ScaleRequested
from elastic_driver.runtime.api import DriverRoutes
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.page_routes import FOLDER
from elastic_driver.runtime.status_routes import MAX_STREAMS
from rendezvous.access import PAGE_FILES
from rendezvous.auth import agent_token, operator_token, reader_token, worker_token
from rendezvous.server import RendezvousServer
from tests.rendezvous.common import eventually
from tests.runtime.test_api import TOKEN, NotingDriver
from tests.support.certificates import CertificateAuthority
from tests.support.pictures import status_of_size

HOSTILE = '<img src=x onerror="document.title=1">'
JSON_TYPE = {"Content-Type": "application/json"}


class PictureDriver(NotingDriver):
    """A driver whose status is that of a job of two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.document = status_of_size(2)

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        reply(json.dumps(self.document).encode())


class Page:
    """A server with the driver's routes, and requests as a browser sends them."""

    def __init__(self) -> None:
        self.driver = PictureDriver()
        self.log = EventLog(None, clock=lambda: 1.0, on_broken=lambda _: None)
        self.server = RendezvousServer(
            token=TOKEN, routes=DriverRoutes(self.driver, self.log).add_to
        )

    def open(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        sent = body if isinstance(body, str) or body is None else json.dumps(body)
        connection.request(method, path, sent, headers)
        return connection, connection.getresponse()

    def call(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection, response = self.open(method, path, body, **headers)
        try:
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def login(self, **given: str) -> str:
        """Log in and return the cookie."""
        status, headers, body = self.call("POST", "/login", given)
        assert status == 200, body
        return str(headers["Set-Cookie"]).partition(";")[0]


@pytest.fixture
def page() -> Iterator[Page]:
    subject = Page()
    with subject.server:
        yield subject
        subject.log.close()


# ---- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", *PAGE_FILES])
def test_the_page_needs_no_token_and_allows_nothing_of_others(page: Page, path: str) -> None:
    status, headers, body = page.call("GET", path)
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert page.call("GET", path, **{"If-None-Match": headers["ETag"]})[0] == 304
    assert b"http://" not in body.replace(b"http://www.w3.org/", b"")


def test_the_bundle_is_small_and_loads_nothing_from_elsewhere() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 150_000
    text = (FOLDER / "index.html").read_text()
    assert "style=" not in text, "the policy forbids it"
    assert "<script>" not in text
    script = (FOLDER / "app.js").read_text()
    assert not [word for word in ("innerHTML", "eval(", "new Function") if word in script]


# ---- login ---------------------------------------------------------------------------------


def test_a_token_becomes_a_cookie_that_no_script_and_no_other_site_has(page: Page) -> None:
    status, headers, body = page.call("POST", "/login", {"token": TOKEN})
    assert (status, json.loads(body)) == (200, {"role": "operator"})
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert "Secure" not in cookie, "this server speaks plain HTTP"
    assert TOKEN not in cookie
    secret = cookie.partition(";")[0]
    assert page.call("GET", "/v1/status", Cookie=secret)[0] == 200
    assert json.loads(page.call("GET", "/login", Cookie=secret)[2]) == {"role": "operator"}


def test_with_tls_the_cookie_travels_over_tls_only(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "site")
    log = EventLog(None, clock=lambda: 1.0, on_broken=lambda _: None)
    routes = DriverRoutes(PictureDriver(), log).add_to
    certificate = authority.certificate("127.0.0.1")
    with RendezvousServer(token=TOKEN, routes=routes, certificate=certificate) as server:
        known = ssl.create_default_context(cafile=str(authority.ca))
        address = ("127.0.0.1", server.port)
        connection = http.client.HTTPSConnection(*address, timeout=30, context=known)
        connection.request("POST", "/login", json.dumps({"token": TOKEN}))
        answer = connection.getresponse()
        assert answer.status == 200
        assert "Secure" in answer.headers["Set-Cookie"]
        connection.close()


def test_a_form_logs_in_without_a_script(page: Page) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, headers, _ = page.call("POST", "/login", f"token={TOKEN}", **form)
    assert (status, headers["Location"]) == (303, "/")
    assert headers["Set-Cookie"]


def test_without_a_session_there_is_no_data(page: Page) -> None:
    assert json.loads(page.call("GET", "/login")[2]) == {"role": None}
    assert page.call("GET", "/v1/live")[0] == 401
    assert page.call("GET", "/v1/status", Cookie="elastic_session=guessed")[0] == 401
    assert page.call("POST", "/login", {"token": "wrong"})[0] == 401
    assert page.call("POST", "/login", {"code": "wrong"})[0] == 401
    assert page.call("POST", "/login", {"token": 7})[0] == 422
    assert page.server.refusals.snapshot()["unauthorized"] == 4, "they count as wrong tokens"


def test_a_worker_gets_no_page(page: Page) -> None:
    token = worker_token(agent_token(TOKEN, "a"), "a.0.1")
    status, _, body = page.call("POST", "/login", {"token": token})
    assert (status, json.loads(body)["error"]["code"]) == (403, "no_session")
    for refused in (token, reader_token(TOKEN)):
        bearer = {"Authorization": f"Bearer {refused}"}
        assert page.call("POST", "/v1/login-codes", {}, **bearer)[0] == 403


def test_a_code_logs_in_once(page: Page) -> None:
    bearer = {"Authorization": f"Bearer {operator_token(TOKEN)}"}
    code = json.loads(page.call("POST", "/v1/login-codes", {}, **bearer)[2])["code"]
    cookie = page.login(code=code)
    status, headers, _ = page.call("GET", "/v1/status", Cookie=cookie)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert headers["Server"] == "elastic-driver", "neither a version nor a library"
    assert page.call("POST", "/login", {"code": code})[0] == 401
    assert page.call("POST", "/logout", {}, Cookie=cookie)[0] == 403, "another site's form"
    assert page.call("POST", "/logout", {}, Cookie=cookie, **{"X-Elastic": "page"})[0] == 204
    assert page.call("GET", "/v1/status", Cookie=cookie)[0] == 401


def test_only_our_page_steers_by_cookie_and_only_for_an_operator(page: Page) -> None:
    operator, ours = page.login(token=operator_token(TOKEN)), {"X-Elastic": "page"}
    wish = {"num_proc": 3}
    assert page.call("POST", "/v1/scale", wish, Cookie=operator)[0] == 403, "another site's form"
    assert page.call("POST", "/v1/scale", wish, Cookie=operator, **ours)[0] == 202
    assert page.driver.posted == [ScaleRequested(3)]
    reader = page.login(token=reader_token(TOKEN))
    assert page.call("GET", "/v1/status", Cookie=reader)[0] == 200
    for path in ("/v1/scale", "/v1/stop", "/v1/stacks", "/v1/hosts/a:drain"):
        assert page.call("POST", path, wish, Cookie=reader, **ours)[0] == 403
    status, _, body = page.call("POST", "/v1/kv:batch", {}, Cookie=reader, **ours)
    assert status == 403, body


# ---- the stream ----------------------------------------------------------------------------


class Stream:
    """Messages of `GET /v1/live`."""

    def __init__(self, page: Page, cookie: str) -> None:
        self.connection, self.response = page.open("GET", "/v1/live", Cookie=cookie)
        assert self.response.status == 200
        assert self.response.headers["Content-Type"] == "text/event-stream"

    def next(self, kind: str) -> Any:
        """Return the data of the next message of a kind."""
        found = ""
        while line := self.response.readline().decode():
            if line.startswith("event: "):
                found = line.removeprefix("event: ").strip()
            elif line.startswith("data: ") and found == kind:
                return json.loads(line.removeprefix("data: "))
        raise AssertionError(f"the stream has ended without {kind}")


def test_the_stream_begins_with_the_whole_picture_and_goes_on_with_changes(page: Page) -> None:
    page.log.append("host_discovered", reason=HOSTILE, host="a")
    stream = Stream(page, page.login(token=reader_token(TOKEN)))
    try:
        hello = stream.next("hello")
        assert (hello["role"], hello["now"]) == ("reader", pytest.approx(time.time(), abs=30))
        (first,) = stream.next("events")
        assert first["n"] == 1
        assert first["text"] == f"host a was discovered: {HOSTILE}", "as it is: the page escapes"
        whole = stream.next("status")
        assert whole["full"]
        assert set(whole["members"]) == {"h0.0.1", "h0.1.1"}
        assert whole["hosts"]["h0"]["states"] == {"running": 2}
        assert whole["job"]["size"] == 2
        assert stream.next("history")["t"] == [10.5, 11.5]
        page.log.append("worker_lost", worker="h0.1.1", host="h0")
        page.driver.document = status_of_size(1)
        assert stream.next("events")[0]["event"] == "worker_lost"
        change = stream.next("status")  # nothing else has changed in the meantime
        assert not change["full"]
        assert change["members"] == {"h0.1.1": None}
        assert set(change["hosts"]) == {"h0"}
        assert change["job"]["size"] == 1
        assert "run_id" not in change["job"], "it has not changed"
        page.log.close()
        stream.next("end")
    finally:
        stream.connection.close()


def test_the_driver_is_asked_only_while_somebody_looks(page: Page) -> None:
    asked: list[None] = []
    before = page.driver.ask_status

    def ask(reply: Callable[[bytes], None]) -> None:
        asked.append(None)
        before(reply)

    page.driver.ask_status = ask  # type: ignore[method-assign]
    cookie = page.login(token=TOKEN)
    streams = [Stream(page, cookie) for _ in range(3)]
    for stream in streams:
        stream.next("status")
    looks = len(asked)
    assert looks <= 3, "all readers share the looks"
    for stream in streams:
        stream.connection.close()
        stream.response.close()
    eventually(lambda: not page.log._listeners, "nobody looks any more")
    looks = len(asked)
    page.log.append("job_started")
    page.call("GET", "/v1/history", Cookie=cookie)
    assert len(asked) == looks


def test_there_are_at_most_so_many_streams(page: Page) -> None:
    cookie = page.login(token=TOKEN)
    streams = [Stream(page, cookie) for _ in range(MAX_STREAMS)]
    status, _, body = page.call("GET", "/v1/live", Cookie=cookie)
    assert status == 503
    assert json.loads(body)["error"]["code"] == "too_many_streams"
    for stream in streams:
        stream.connection.close()
        stream.response.close()
