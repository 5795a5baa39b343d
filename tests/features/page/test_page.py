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

from elastic_driver.features.page.routes import FOLDER, PAGE_FILES
from elastic_driver.runtime.api import DriverRoutes, job_access
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.status_routes import MAX_STREAMS
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.wire_events import ScaleRequested
from rendezvous import sessions
from rendezvous.auth import operator_token, reader_token
from rendezvous.server import RendezvousServer, ServerTls
from tests.rendezvous.common import eventually
from tests.runtime.test_api import TOKEN, NotingDriver
from tests.support.certificates import CertificateAuthority
from tests.support.pictures import status_of_size

HOSTILE = '<img src=x onerror="document.title=1">'
OURS = {"X-Elastic": "page"}
Headers = dict[str, str]


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
            token=TOKEN, access=job_access(), routes=DriverRoutes(self.driver, self.log).add_to
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

    def login(self, *, cookie: str = "", **given: str) -> Headers:
        """Log in and return the headers of the session."""
        headers = {**OURS, "Cookie": cookie} if cookie else OURS
        status, told, body = self.call("POST", "/login", given, **headers)
        assert status == 200, body
        cookie = str(told["Set-Cookie"]).partition(";")[0]
        return {"Cookie": cookie, "X-Elastic": json.loads(body)["key"]}


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
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-cache"
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
    status, headers, body = page.call("POST", "/login", {"token": TOKEN}, **OURS)
    assert (status, json.loads(body)["role"]) == (200, "operator")
    key, cookie = json.loads(body)["key"], headers["Set-Cookie"]
    assert key not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert "Secure" not in cookie, "this server speaks plain HTTP"
    assert TOKEN not in cookie
    both = {"Cookie": cookie.partition(";")[0], "X-Elastic": key}
    assert page.call("GET", "/v1/status", **both)[0] == 200
    assert json.loads(page.call("GET", "/login", **both)[2])["role"] == "operator"


def test_with_tls_the_cookie_travels_over_tls_only(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "site")
    log = EventLog(None, clock=lambda: 1.0, on_broken=lambda _: None)
    routes = DriverRoutes(PictureDriver(), log).add_to
    certificate = authority.certificate("127.0.0.1")
    with RendezvousServer(
        token=TOKEN, access=job_access(), routes=routes, tls=ServerTls(certificate=certificate)
    ) as server:
        known = ssl.create_default_context(cafile=str(authority.ca))
        address = ("127.0.0.1", server.port)
        connection = http.client.HTTPSConnection(*address, timeout=30, context=known)
        connection.request("POST", "/login", json.dumps({"token": TOKEN}), OURS)
        answer = connection.getresponse()
        assert answer.status == 200
        assert "Secure" in answer.headers["Set-Cookie"]
        connection.close()


def test_a_cookie_alone_is_no_session(page: Page) -> None:
    """Every server of this host's name gets it from the browser, those of other users too."""
    both = page.login(token=TOKEN)
    cookie, key = both["Cookie"], both["X-Elastic"]
    name = cookie.partition("=")[0]
    for headers in (
        {"Cookie": cookie},
        {"Cookie": cookie, **OURS},
        {"X-Elastic": key},
        {"Cookie": f"{name}={key}", "X-Elastic": key},
        {"Cookie": cookie, "X-Elastic": cookie.partition("=")[2]},
        {"Cookie": cookie, "X-Elastic": page.login(token=TOKEN)["X-Elastic"]},
    ):
        assert page.call("GET", "/v1/live", **headers)[0] == 401
        status, told, _ = page.call("GET", "/v1/status", **headers)
        assert (status, told["Cache-Control"]) == (401, "no-store")
        assert json.loads(page.call("GET", "/login", **headers)[2])["role"] is None
        page.server.refusals._peers.clear()  # this test is in a hurry
    assert page.call("POST", "/v1/scale", {"num_proc": 3}, Cookie=cookie, **OURS)[0] == 401
    assert page.call("POST", "/logout", {}, Cookie=cookie, **OURS)[0] == 401
    assert page.driver.posted == []
    assert page.call("GET", "/v1/status", **both)[0] == 200


def test_a_second_tab_logs_in_for_itself_and_leaves_the_first_one_alone(page: Page) -> None:
    first = page.login(token=TOKEN)
    second = page.login(cookie=first["Cookie"], token=reader_token(TOKEN))
    assert first["Cookie"] == second["Cookie"], "they share the browser's cookies"
    for tab, role in ((first, "operator"), (second, "reader")):
        assert json.loads(page.call("GET", "/login", **tab)[2])["role"] == role
    assert page.call("POST", "/logout", {}, **first)[0] == 204
    assert page.call("GET", "/v1/status", **second)[0] == 401, "the browser is logged out"


def test_no_other_site_logs_a_browser_in(page: Page) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, headers in ((f"token={TOKEN}", form), (json.dumps({"token": TOKEN}), {})):
        status, told, _ = page.call("POST", "/login", body, **headers)
        assert (status, told["Set-Cookie"]) == (403, None)


def test_nothing_that_is_answered_is_kept(page: Page) -> None:
    operator, reader = page.login(token=TOKEN), page.login(token=reader_token(TOKEN))
    for wanted, method, path, headers in (
        (200, "GET", "/v1/status", operator),
        (200, "GET", "/login", operator),
        (404, "GET", "/v1/nothing", operator),
        (422, "GET", "/v1/history?since=x", operator),
        (405, "PUT", "/v1/status", operator),
        (403, "POST", "/v1/stop", reader),
        (401, "GET", "/v1/status", {}),
        (204, "POST", "/logout", operator),
    ):
        status, told, _ = page.call(method, path, **headers)
        found = status, told["Cache-Control"], told["X-Content-Type-Options"]
        assert found == (wanted, "no-store", "nosniff"), path


def test_without_a_session_there_is_no_data(page: Page) -> None:
    assert json.loads(page.call("GET", "/login")[2])["role"] is None
    assert page.call("GET", "/v1/live")[0] == 401
    assert page.call("GET", "/v1/status", Cookie="elastic_session=guessed")[0] == 401
    assert page.call("POST", "/login", {"token": "wrong"}, **OURS)[0] == 401
    assert page.call("POST", "/login", {"code": "wrong"}, **OURS)[0] == 401
    assert page.call("POST", "/login", {"token": 7}, **OURS)[0] == 422
    assert page.server.refusals.snapshot()["unauthorized"] == 4, "they count as wrong tokens"


def test_a_worker_gets_no_page(page: Page) -> None:
    token = worker_token(agent_token(TOKEN, "a"), "a.0.1")
    status, _, body = page.call("POST", "/login", {"token": token}, **OURS)
    assert (status, json.loads(body)["error"]["code"]) == (403, "no_session")
    for refused in (token, reader_token(TOKEN)):
        bearer = {"Authorization": f"Bearer {refused}"}
        assert page.call("POST", "/v1/login-codes", {}, **bearer)[0] == 403


def test_a_code_logs_in_once(page: Page) -> None:
    bearer = {"Authorization": f"Bearer {operator_token(TOKEN)}"}
    code = json.loads(page.call("POST", "/v1/login-codes", {}, **bearer)[2])["code"]
    session = page.login(code=code)
    status, headers, _ = page.call("GET", "/v1/status", **session)
    assert status == 200
    assert headers["Server"] == "elastic-driver", "neither a version nor a library"
    assert page.call("POST", "/login", {"code": code}, **OURS)[0] == 401
    assert page.call("POST", "/logout", {}, Cookie=session["Cookie"])[0] == 401, "another's form"
    assert page.call("POST", "/logout", {}, **session)[0] == 204
    assert page.call("GET", "/v1/status", **session)[0] == 401


def test_only_our_page_steers_and_only_for_an_operator(page: Page) -> None:
    operator, wish = page.login(token=operator_token(TOKEN)), {"num_proc": 3}
    assert page.call("POST", "/v1/scale", wish, Cookie=operator["Cookie"])[0] == 401
    assert page.call("POST", "/v1/scale", wish, **operator)[0] == 202
    assert page.driver.posted == [ScaleRequested(3)]
    reader = page.login(token=reader_token(TOKEN))
    assert page.call("GET", "/v1/status", **reader)[0] == 200
    for path in ("/v1/scale", "/v1/stop", "/v1/stacks", "/v1/hosts/a:drain"):
        assert page.call("POST", path, wish, **reader)[0] == 403
    status, _, body = page.call("POST", "/v1/kv:batch", {}, **reader)
    assert status == 403, body


# ---- the stream ----------------------------------------------------------------------------


class Stream:
    """Messages of `GET /v1/live`."""

    def __init__(self, page: Page, session: Headers) -> None:
        self.connection, self.response = page.open("GET", "/v1/live", **session)

    def next(self, kind: str) -> Any:
        """Return the data of the next message of a kind."""
        assert self.response.headers["Content-Type"] == "text/event-stream"
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


@pytest.mark.parametrize("path", ["/v1/live", "/v1/events"])
def test_a_stream_ends_with_its_session(
    page: Page, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Twelve hours after the login, or when the browser logs out."""
    monkeypatch.setattr(sessions, "SESSION_S", 1.0)
    session = page.login(token=TOKEN)
    connection, response = page.open("GET", path, **session, Accept="text/event-stream")
    until_it_ends(response)
    connection.close()
    assert page.call("GET", "/v1/status", **session)[0] == 401
    monkeypatch.undo()
    session = page.login(token=TOKEN)
    connection, response = page.open("GET", path, **session, Accept="text/event-stream")
    assert response.status == 200
    assert page.call("POST", "/logout", {}, **session)[0] == 204
    until_it_ends(response)
    connection.close()


def until_it_ends(response: http.client.HTTPResponse) -> None:
    """Read a stream that is broken off, within the time of the connection."""
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        response.read()


def test_the_driver_is_asked_only_while_somebody_looks(page: Page) -> None:
    asked: list[None] = []
    before = page.driver.ask_status

    def ask(reply: Callable[[bytes], None]) -> None:
        asked.append(None)
        before(reply)

    page.driver.ask_status = ask  # type: ignore[method-assign]
    session = page.login(token=TOKEN)
    streams = [Stream(page, session) for _ in range(3)]
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
    page.call("GET", "/v1/history", **session)
    assert len(asked) == looks


def test_one_client_has_a_share_of_the_streams_and_people_have_a_reserve(page: Page) -> None:
    """A reader's token and workers take all that they can get; people still see the job."""
    agents, streams = agent_token(TOKEN, "a"), list[Stream]()
    try:
        for token in (reader_token(TOKEN), *(worker_token(agents, f"a.0.{n}") for n in range(4))):
            streams += streams_until_refused(page, {"Authorization": f"Bearer {token}"})
        assert len(streams) == MAX_STREAMS - MAX_STREAMS // 8
        reader = page.login(token=reader_token(TOKEN))
        streams += streams_until_refused(page, reader)
        assert len(streams) == MAX_STREAMS - MAX_STREAMS // 16
        streams += streams_until_refused(page, page.login(token=operator_token(TOKEN)))
        assert len(streams) == MAX_STREAMS
        for stream in streams:
            assert stream.response.status == 200
            stream.next("hello")
    finally:
        for stream in streams:
            stream.connection.close()
            stream.response.close()


def streams_until_refused(page: Page, headers: Headers) -> list[Stream]:
    """Return as many streams as a client gets."""
    found = list[Stream]()
    while len(found) <= MAX_STREAMS:
        stream = Stream(page, headers)
        if stream.response.status != 200:
            refused = json.loads(stream.response.read())
            stream.connection.close()
            assert refused["error"]["code"] == "too_many_streams"
            return found
        found.append(stream)
    raise AssertionError("there is no bound")
