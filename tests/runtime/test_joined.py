"""Nodes over real HTTP: taken in, told what to do, and dropped when they are silent or go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_driver.core.join_messages import (
    ATTEND_PATH,
    JOIN_PATH,
    LEAVE_PATH,
    AgentEnd,
    AttendRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    NodeOrders,
)
from elastic_driver.errors import ClusterError
from elastic_driver.runtime.joined import JoinedNodes, NodeRules
from rendezvous.auth import write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnauthorizedError
from rendezvous.server import RendezvousServer

PATIENCE_S = 0.6


class Site:
    """A rendezvous with nodes, and a node's side of the conversation."""

    def __init__(self, folder: Path) -> None:
        rules = NodeRules("run", "1.0", PATIENCE_S, 30.0, 2, frozenset({"server"}))
        self.nodes = JoinedNodes(rules, ("a secret",))
        token_file = write_token_file(folder / "token", "token")
        self.server = RendezvousServer(
            token="token", others=self.nodes.secrets, routes=self.nodes.add_to
        ).start()
        self.nodes.open(token_file)
        self.lost: list[str] = []

    def client(self, token: str = "token") -> RendezvousClient:  # noqa: S107 - of this test alone
        return RendezvousClient(self.server.url, token, timeout=5.0)

    def join(self, name: str, *, machine: str = "m", session: str = "", **more: object) -> Joined:
        wish = JoinRequest(name, machine, session or f"{name}-{machine}", "1.0")
        wish = msgspec.structs.replace(wish, **more)
        with self.client("a secret") as client:
            body = client.post_json(JOIN_PATH, msgspec.json.encode(wish))
        return msgspec.json.decode(body, type=Joined)

    def attend(
        self, session: str, known: int = 0, *ended: AgentEnd, wait: float = 0.0
    ) -> NodeOrders:
        request = AttendRequest(session, known, ended, wait)
        with self.client() as client:
            body = client.post_json(ATTEND_PATH, msgspec.json.encode(request))
        return msgspec.json.decode(body, type=NodeOrders)

    def start(self, host: str, incarnation: int = 1) -> None:
        self.nodes.start(host, incarnation, self.lost.append)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.server.stop()


def test_a_node_is_a_host_from_its_join_on_and_is_told_to_start_an_agent(site: Site) -> None:
    assert site.nodes.find() == ()
    joined = site.join("n1", slots=4)
    assert (joined.name, joined.token, joined.run_id) == ("n1", "token", "run")
    site.join("n2")
    assert site.nodes.find() == (("n1", 4), ("n2", 2))
    known = site.attend("n1-m").number
    site.start("n1")
    orders = site.attend("n1-m", known, wait=5.0)
    assert (orders.started, orders.killed, orders.over) == ((1,), (), None)
    site.nodes.kill("n1", 1)
    assert site.attend("n1-m", orders.number, wait=5.0).killed == (1,)
    after = site.attend("n1-m", 0, AgentEnd(1, "the agent on n1 was killed"))
    assert (after.started, after.killed) == ((), ())
    assert site.lost == ["the agent on n1 was killed"]


def test_names_are_unique_and_a_node_that_comes_back_has_its_own_again(site: Site) -> None:
    assert site.join("n1", machine="a").name == "n1"
    assert site.join("n1", machine="b").name == "n1-2"
    assert site.join("server", machine="a").name == "server-2"
    site.start("n1")
    assert site.join("n1", machine="a", session="after a restart").name == "n1"
    assert site.lost == ["node n1 has joined anew"]
    with pytest.raises(RequestError) as gone:
        site.attend("n1-a")
    assert (gone.value.status, gone.value.code) == (410, "not_joined")


def test_a_silent_node_is_dropped_in_time_and_one_that_attends_is_not(site: Site) -> None:
    site.join("quiet")
    site.join("alive")
    site.start("quiet")
    for _ in range(8):
        site.attend("alive-m", site.attend("alive-m").number, wait=PATIENCE_S / 3)
    assert site.nodes.find() == (("alive", 2),)
    assert site.lost == [f"node quiet was not heard of for {PATIENCE_S:g} s"]


def test_a_node_that_leaves_is_no_host_any_more(site: Site) -> None:
    site.join("n1")
    site.start("n1")
    with site.client() as client:
        request = LeaveRequest("n1-m", "node n1 has left")
        client.post_json(LEAVE_PATH, msgspec.json.encode(request))
    assert site.nodes.find() == ()
    assert site.lost == ["node n1 has left"]
    site.start("n1", 2)
    assert site.lost[1:] == ["node n1 has left"]


def test_every_node_hears_how_the_job_has_ended_and_none_joins_then(site: Site) -> None:
    site.join("n1")
    site.nodes.job_ends(7, "rank 0 failed")
    over = site.attend("n1-m").over
    assert over is not None
    assert (over.exit_code, over.reason) == (7, "rank 0 failed")
    site.nodes.close(0.0)  # returns at once: all have heard of it
    site.nodes.cancel()
    with pytest.raises(ClusterError):
        site.nodes.find()


def test_who_does_not_belong_here_is_turned_away(site: Site) -> None:
    with pytest.raises(RequestError) as other:
        site.join("n1", version="0.9")
    assert (other.value.status, other.value.code) == (409, "other_version")
    with pytest.raises(RequestError) as odd:
        site.join("../n1")
    assert odd.value.status == 422
    with site.client("a guess") as stranger, pytest.raises(UnauthorizedError):
        stranger.post_json(JOIN_PATH, b"{}")
    assert site.nodes.find() == ()
