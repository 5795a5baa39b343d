"""The TensorFlow routes as anyone with curl sees them: statuses, errors, the token."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest
import requests

from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until

AB = {"min_nodes": 2, "max_nodes": 2}


class Api:
    """A driver without hosts, and requests without any client of ours."""

    def __init__(self, job: JobUnderTest) -> None:
        self.job, self.token = job, job.cluster.token
        self.port = int(job.driver.endpoint.rpartition(":")[2])

    def call(self, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1/tf/{path}"
        headers = {"Authorization": f"Bearer {token or self.token}"}
        answer = requests.request(method, url, data=json.dumps(body), headers=headers, timeout=20)
        return answer.status_code, answer.json()

    def join(self, address: str = "a:1", wait: float = 0.0, **more: Any) -> Any:
        return self.call("POST", "cluster_spec", {"address": address, "wait": wait, **AB, **more})

    def error(self, *call: Any, **more: Any) -> tuple[int, str]:
        status, body = self.call(*call, **more)
        assert set(body["error"]) == {"code", "message", "hint"}
        return status, body["error"]["code"]


@pytest.fixture
def api(start_job: StartJob) -> Api:
    return Api(start_job((), start_np=1, heartbeat_timeout=10.0))


def test_a_cluster_by_value(api: Api) -> None:
    status, body = api.join("a:1")
    assert (status, body["error"]["code"]) == (408, "timed_out")
    worker = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 1}
    assert api.join("b:1") == (200, {"generation": 1, "cluster": worker, "task": task})
    assert api.join("a:1")[1]["task"] == {"type": "worker", "index": 0}
    news = {"count": 0, "generation": 1, "waiting": [], "lost": []}
    assert api.call("GET", "waiting_nodes?address=a:1") == (200, news)
    passed = {"address": "a:1", "tag": "t", "timeout": 0.05}
    assert api.error("POST", "barrier", passed) == (408, "timed_out")
    assert api.error("POST", "barrier", {**passed, "address": "b:1"}) == (408, "timed_out")


@pytest.mark.parametrize("path", ["cluster_spec", "barrier", "synchronize"])
def test_nothing_is_said_without_the_token(api: Api, path: str) -> None:
    assert api.error("POST", path, {}, token="wrong") == (401, "unauthorized")
    assert api.error("GET", "waiting_nodes", token="wrong") == (401, "unauthorized")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("cluster_spec", {"address": "a", **AB}),
        ("cluster_spec", {"address": "a:1", "min_nodes": 0, "max_nodes": 1}),
        ("cluster_spec", {"address": "a:1", "wait": 61, **AB}),
        ("cluster_spec", {"address": "a:1", "surprise": 1, **AB}),
        ("barrier", {"address": "a:1", "tag": "", "timeout": 1}),
        ("barrier", {"address": "a:1", "tag": "t", "timeout": 0}),
        ("synchronize", {"address": "a:1", "tag": "t", "timeout": 601}),
        ("synchronize", {"address": "a:1", "tag": "t", "timeout": 1, "value": "A" * 1_400_000}),
    ],
)
def test_bodies_are_bounded(api: Api, path: str, body: Any) -> None:
    assert api.error("POST", path, body) == (422, "invalid")


def test_what_can_never_be_is_told_from_what_is_not_now(api: Api) -> None:
    assert api.join(min_nodes=3)[0] == 422
    assert api.error("GET", f"waiting_nodes?address={'a' * 301}") == (422, "invalid")
    request = {"address": "a:1", "tag": "t", "timeout": 1}
    assert api.error("POST", "barrier", request) == (409, "not_a_member")


def test_a_member_that_is_silent_is_lost_and_one_that_asks_is_not(start_job: StartJob) -> None:
    api = Api(start_job((), start_np=1, heartbeat_timeout=2.0))  # a busy machine may take one
    api.join("a:1")
    api.join("b:1")
    api.join("a:1")
    ask = "waiting_nodes?address=a:1"
    news = until(
        lambda: (found := api.call("GET", ask)[1])["count"] and found, "b is lost", timeout=10
    )
    assert news == {"count": -1, "generation": 1, "waiting": [], "lost": ["b:1"]}


def test_a_client_that_goes_away_is_not_given_a_place_for_long(start_job: StartJob) -> None:
    api = Api(start_job((), start_np=1, heartbeat_timeout=0.3))
    body = json.dumps({"address": "a:1", "wait": 60, **AB}).encode()
    head = (
        "POST /v1/tf/cluster_spec HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {api.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.port)) as gone:
        gone.sendall(head.encode() + body)
        until(lambda: api.call("GET", "waiting_nodes")[1]["waiting"] == ["a:1"], "a waits")
    until(lambda: api.call("GET", "waiting_nodes")[1]["waiting"] == [], "a is forgotten")


def test_a_driver_that_stops_turns_away_who_waits(api: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
    body = json.dumps({"address": "a:1", "wait": 60, **AB})
    headers = {"Authorization": f"Bearer {api.token}"}
    connection.request("POST", "/v1/tf/cluster_spec", body, headers)
    until(lambda: api.call("GET", "waiting_nodes")[1]["waiting"] == ["a:1"], "a waits")
    api.job.driver.stop()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "stopping")
    connection.close()
