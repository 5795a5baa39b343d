"""Nodes over real HTTP: taken in, told what to do, and given up when they are silent or go."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from elastic_driver.contract import FIRST_OF_CHECKS
from elastic_driver.errors import ClusterError
from elastic_driver.features.joining import driver as joined
from elastic_driver.features.joining.driver import CheckOfNodes, JoinedNodes, NodeRules
from elastic_driver.runtime.api import job_access
from elastic_driver.token_roles import agent_token, node_token
from elastic_driver.words.joining import (
    HELLO_PATH,
    NODES_PATH,
    PROOF_PATH,
    Hello,
    HelloAnswer,
    JobOver,
    Joined,
    NodeOrder,
    NodeProof,
    NodeReport,
    node_lease,
    node_order,
)
from rendezvous.auth import Handshake, Speaker, make_nonce
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, SealedError, UnauthorizedError
from rendezvous.server import Callbacks, RendezvousServer
from tests.support.job import eventually

PATIENCE_S = 0.6


class OwnAgents:
    """The starter of the server's own node."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def start(self, host: str, incarnation: int, on_lost: object) -> None:
        self.calls.append(("start", host, incarnation))

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: object) -> None:
        self.calls.append(("adopt", host, incarnation, pid))

    def kill(self, host: str, incarnation: int) -> None:
        self.calls.append(("kill", host, incarnation))

    def close(self, grace: float) -> None:
        self.calls.append(("close", grace))


class Site:
    """A rendezvous with nodes, and a node's side of the conversation.

    `awaited`: nodes of a driver that has died.
    """

    def __init__(self, *awaited: tuple[str, int]) -> None:
        rules = NodeRules("run", "1.0", PATIENCE_S, 2)
        self.nodes = JoinedNodes(rules, ("a secret",), (("server", 1),))
        self.own = self.nodes.own_starter = OwnAgents()
        self.server = RendezvousServer(
            token="token",
            access=job_access(),
            routes=self.nodes.add_to,
            callbacks=Callbacks(on_lease_expired=self.nodes.lease_expired),
        ).start()
        if awaited:
            self.nodes.await_nodes((("server", 1), *awaited))
        self.nodes.open(self.server, "token")
        self.lost: list[str] = []
        self.tokens: dict[str, Joined] = {}  # by session

    def client(self, token: str = "token") -> RendezvousClient:  # noqa: S107 - of this test alone
        return RendezvousClient(self.server.url, token, timeout=5.0)

    def report(self, name: str, *, machine: str = "m", session: str = "", **more: object) -> Joined:
        report = NodeReport(name, machine, session or f"{name}-{machine}", "1.0")
        report = msgspec.structs.replace(report, **more)
        joined = self.tokens.get(report.session)
        if joined is None and report.joined_as is None:
            with self.client("") as client:
                joined = self.join(client, report)
        else:
            before = node_token("token", report.joined_as or "")
            with self.client(before if joined is None else joined.token) as client:
                body = client.post_json(NODES_PATH, msgspec.json.encode(report))
            joined = msgspec.json.decode(body, type=Joined)
        self.tokens[report.session] = joined
        return joined

    def join(
        self,
        client: RendezvousClient,
        report: NodeReport,
        secret: str = "a secret",  # noqa: S107 - of this test alone
        fingerprint: str = "",
    ) -> Joined:
        """A node's side of the proof, and what it is answered."""
        hello = Hello(make_nonce())
        body = client.post_json(HELLO_PATH, msgspec.json.encode(hello))
        answer = msgspec.json.decode(body, type=HelloAnswer)
        handshake = Handshake(hello.nonce, answer.nonce, fingerprint)
        proof = NodeProof(answer.nonce, handshake.prove(secret, Speaker.NODE), report)
        return self.prove(client, proof)

    def prove(self, client: RendezvousClient, proof: NodeProof) -> Joined:
        body = client.post_json(PROOF_PATH, msgspec.json.encode(proof))
        return msgspec.json.decode(body, type=Joined)

    def order(self, session: str, after: int = 0) -> tuple[NodeOrder, int]:
        """The node's order that is newer than this revision, and its own."""
        with self.client(self.tokens[session].token) as client:
            key = node_order(self.tokens[session].name, session)
            entry = client.get(key, wait=5.0, after=after)
        assert entry is not None
        return msgspec.json.decode(entry.value, type=NodeOrder), entry.revision

    def renew(self, session: str) -> None:
        with self.client(self.tokens[session].token) as client:
            key = node_lease(self.tokens[session].name, session)
            client.set(key, b"", lease=PATIENCE_S)

    def start(self, host: str, incarnation: int = 1) -> None:
        self.nodes.start(host, incarnation, self.lost.append)

    def hosts(self) -> tuple[tuple[str, int], ...]:
        """The hosts besides the server's own."""
        own, *joined = self.nodes.find()
        assert own == ("server", 1)
        return tuple(joined)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.stop()


def test_a_node_is_a_host_from_its_join_on_and_is_told_to_start_an_agent(site: Site) -> None:
    assert site.hosts() == ()
    joined = site.report("n1", slots=4)
    assert (joined.name, joined.run_id) == ("n1", "run")
    assert joined.token == node_token("token", "n1")
    assert joined.agent_token == agent_token("token", "n1")
    site.report("n2")
    assert site.hosts() == (("n1", 4), ("n2", 2))
    site.start("n1")
    order, revision = site.order("n1-m")
    assert order == NodeOrder(incarnation=1)
    site.nodes.kill("n1", 1)
    order, revision = site.order("n1-m", revision)
    assert order == NodeOrder(incarnation=1, killed=1)
    site.report("n1", ended=1, reason="the agent on n1 was killed")
    assert site.lost == ["the agent on n1 was killed"]
    site.start("n1", 2)
    order, revision = site.order("n1-m", revision)
    assert order == NodeOrder(incarnation=2, killed=1)


def test_an_agent_that_was_never_begun_is_told_of_with_its_successor(site: Site) -> None:
    site.report("n1")
    site.start("n1", 1)
    site.start("n1", 2)
    assert site.order("n1-m")[0] == NodeOrder(incarnation=2)
    site.report("n1", ended=2, reason="the agent on n1 has ended")
    assert site.lost == ["the agent on n1 has ended"] * 2


def test_the_agents_of_a_check_and_of_the_job_run_beside_each_other(site: Site) -> None:
    site.report("n1")
    check = CheckOfNodes(site.nodes)
    site.start("n1", 3)
    check.start("n1", FIRST_OF_CHECKS + 1, site.lost.append)
    order, revision = site.order("n1-m")
    assert order == NodeOrder(incarnation=3, check=FIRST_OF_CHECKS + 1)
    check.kill("n1", FIRST_OF_CHECKS + 1)
    order, _ = site.order("n1-m", revision)
    assert (order.killed, order.check_killed) == (0, FIRST_OF_CHECKS + 1)
    site.report("n1", ended=FIRST_OF_CHECKS + 1, reason="the check's agent was killed")
    assert site.lost == ["the check's agent was killed"]
    check.close(0.0)
    site.report("n1", ended=3, reason="the job's agent has ended")
    assert site.lost[1:] == ["the job's agent has ended"]


def test_the_servers_own_node_has_its_own_starter(site: Site) -> None:
    site.report("n1")
    site.start("server")
    site.nodes.kill("server", 1)
    site.nodes.job_ends(0, "")
    site.report("n1", leaves=True, reason="node n1 has left")
    site.nodes.close(0.0)
    assert site.own.calls == [("start", "server", 1), ("kill", "server", 1), ("close", 0.0)]


def test_names_are_unique_and_a_node_that_comes_back_has_its_own_again(site: Site) -> None:
    assert site.report("n1", machine="a").name == "n1"
    assert site.report("n1", machine="b").name == "n1-2"
    assert site.report("server", machine="a").name == "server-2"
    site.start("n1")
    assert site.report("n1", machine="a", session="after a restart").name == "n1"
    assert site.lost == ["node n1 has joined anew"]
    with pytest.raises(SealedError):
        site.renew("n1-a")
    with pytest.raises(RequestError) as gone:
        site.report("n1", machine="a", ended=1)
    assert (gone.value.status, gone.value.code) == (410, "not_joined")


def test_a_silent_node_is_dropped_in_time_and_one_that_renews_its_lease_is_not(site: Site) -> None:
    site.report("quiet")
    site.report("alive")
    site.start("quiet")

    def only_one_is_left() -> bool:
        site.renew("alive-m")
        return site.hosts() == (("alive", 2),)

    eventually(only_one_is_left, within=10, what="the silent node is dropped")
    assert site.lost == [f"node quiet was not heard from for {PATIENCE_S:g} s"]


def test_a_node_that_leaves_is_no_host_any_more(site: Site) -> None:
    site.report("n1")
    site.start("n1")
    site.report("n1", leaves=True, reason="node n1 has left")
    assert site.hosts() == ()
    assert site.lost == ["node n1 has left"]
    site.start("n1", 2)
    assert site.lost[1:] == ["node n1 has left"]


def test_every_node_hears_how_the_job_has_ended_and_none_joins_then(site: Site) -> None:
    site.report("n1")
    site.nodes.job_ends(7, "rank 0 failed")
    over = site.order("n1-m")[0].over
    assert over is not None
    assert (over.exit_code, over.reason) == (7, "rank 0 failed")
    site.report("n1", leaves=True, reason="node n1 has left")
    site.nodes.close(0.0)  # returns at once: all have left
    site.nodes.cancel()
    with pytest.raises(ClusterError):
        site.nodes.find()


def test_who_does_not_belong_here_is_turned_away(site: Site) -> None:
    with pytest.raises(RequestError) as other:
        site.report("n1", version="0.9")
    assert (other.value.status, other.value.code) == (409, "other_version")
    with pytest.raises(RequestError) as odd:
        site.report("../n1")
    assert odd.value.status == 422
    with site.client("a guess") as stranger, pytest.raises(UnauthorizedError):
        stranger.post_json(NODES_PATH, b"{}")
    assert site.hosts() == ()


# ---- the proof -----------------------------------------------------------------------------


def test_without_a_proof_or_a_token_nothing_is_told_and_nothing_is_done(site: Site) -> None:
    report = msgspec.json.encode(NodeReport("n1", "m", "s", "1.0"))
    with site.client("") as stranger:
        for path in (NODES_PATH, "/v1/kv/job/spec"):
            with pytest.raises(UnauthorizedError):
                stranger.post_json(path, report)
        with pytest.raises(UnauthorizedError):
            stranger.get("job/spec")
    with site.client("a secret") as older, pytest.raises(UnauthorizedError):
        older.post_json(NODES_PATH, report)
    with site.client() as older, pytest.raises(RequestError, match="has not proved") as refused:
        older.post_json(NODES_PATH, report)
    assert refused.value.status == 409, "what older programs show to their user"
    assert "install the same elastic-driver everywhere" in str(refused.value)
    assert site.hosts() == ()


def test_a_node_reports_about_itself_only(site: Site) -> None:
    site.report("n1")
    site.report("n2")
    left = NodeReport("n2", "m", "n2-m", "1.0", leaves=True)
    stolen = NodeReport("n1", "m", "of n1", "1.0", joined_as="n2")
    with site.client(node_token("token", "n1")) as client:
        for report in (left, stolen):
            with pytest.raises(RequestError, match="the token of node n1 is not that of n") as no:
                client.post_json(NODES_PATH, msgspec.json.encode(report))
            assert no.value.status == 403
        with pytest.raises(RequestError, match="may not write"):
            client.set(node_lease("n2", "n2-m"), b"", lease=60.0)
    assert [name for name, _ in site.hosts()] == ["n1", "n2"]


def test_a_token_of_a_node_names_that_node_and_drives_no_other_away(site: Site) -> None:
    for name, machine in (("n1", "a"), ("n2", "b")):
        site.report(name, machine=machine)
    site.start("n2")
    wished = [
        NodeReport("n2", "b", "new", "1.0", joined_as="n1"),  # the name and machine of another
        NodeReport("n9", "a", "newer", "1.0", joined_as="n1"),  # a name of nobody
        NodeReport("n1", "z", "newest", "1.0", joined_as="n1"),  # another machine
    ]

    def answer(report: NodeReport) -> str:
        try:
            with site.client(node_token("token", "n1")) as client:
                body = client.post_json(NODES_PATH, msgspec.json.encode(report))
        except RequestError as refused:
            return refused.code
        return msgspec.json.decode(body, type=Joined).name

    assert [answer(report) for report in wished] == ["not_joined", "n1", "not_joined"]
    assert sorted(name for name, _ in site.hosts()) == ["n1", "n2"]
    assert site.lost == []


@pytest.mark.parametrize("secret", ["a secret", "token"])
def test_a_node_may_know_the_secret_or_the_runs_token(site: Site, secret: str) -> None:
    with site.client("") as client:
        assert site.join(client, NodeReport("n1", "m", "s", "1.0"), secret).name == "n1"


def test_a_wrong_proof_opens_nothing_and_its_address_is_named_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    report = NodeReport("n1", "m", "s", "1.0")
    wrong = [("another secret", ""), ("another secret", ""), ("a secret", "sha256:of-a-relay")]
    for secret, fingerprint in wrong:
        with site.client("") as client, pytest.raises(RequestError) as refused:
            site.join(client, report, secret, fingerprint)
        assert (refused.value.status, refused.value.code) == (403, "no_proof")
    assert site.hosts() == ()
    (line,) = [r.getMessage() for r in caplog.records if "did not prove" in r.getMessage()]
    assert line.startswith(f"a program at localhost (user {os.getuid()}) asked to join and did")
    assert "another secret" not in caplog.text
    assert site.server.hits.snapshot()["no_proof"] == 3


def test_a_recorded_proof_is_good_for_nothing(site: Site) -> None:
    report, nonce = NodeReport("n1", "m", "s", "1.0"), make_nonce()
    with site.client("") as client:

        def hello() -> HelloAnswer:
            body = client.post_json(HELLO_PATH, msgspec.json.encode(Hello(nonce)))
            return msgspec.json.decode(body, type=HelloAnswer)

        first = hello()
        secret = Handshake(nonce, first.nonce).prove("a secret", Speaker.NODE)
        recorded = NodeProof(first.nonce, secret, report)
        assert site.prove(client, recorded).name == "n1"
        assert site.hosts() == (("n1", 2),)
        again = msgspec.structs.replace(recorded, nonce=hello().nonce)
        for proof in (recorded, again):
            with pytest.raises(RequestError, match="wrong, late or repeated"):
                site.prove(client, proof)
        second = hello()
        sent_back = NodeProof(second.nonce, second.proofs[0], report)
        with pytest.raises(RequestError, match="wrong, late or repeated"):
            site.prove(client, sent_back)
    assert len(site.hosts()) <= 1, "no other node"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 422), (b"{", 400), (b'{"nonce":"aa"}', 422), (b" " * 20_000, 413)],
)
def test_what_strangers_send_is_bounded(site: Site, body: bytes, status: int) -> None:
    with site.client("") as client:
        for path in (HELLO_PATH, PROOF_PATH):
            with pytest.raises(RequestError) as refused:
                client.post_json(path, body)
            assert refused.value.status == status


# ---- after the death of a driver -----------------------------------------------------------


@pytest.fixture
def resumed() -> Iterator[Site]:
    site = Site(("n1", 2), ("n1-2", 3))
    yield site
    site.server.stop()


def test_nodes_of_the_driver_before_are_hosts_and_keep_name_slots_and_agents(resumed: Site) -> None:
    assert resumed.hosts() == (("n1", 2), ("n1-2", 3))
    resumed.nodes.adopt("n1-2", 1, 4711, resumed.lost.append)  # the agent is quicker than its node
    assert resumed.report("n1", machine="new").name == "n1-3", "their names are theirs"
    assert resumed.report("n1-2", joined_as="n1-2", slots=3).name == "n1-2"
    resumed.nodes.kill("n1-2", 1)
    eventually(lambda: resumed.order("n1-2-m")[0].killed == 1, within=5, what="it is killed")
    resumed.report("n1-2", session="n1-2-m", ended=1, reason="it was killed")
    assert resumed.lost == ["it was killed"]


def test_orders_for_a_node_wait_until_it_is_back(resumed: Site) -> None:
    resumed.nodes.kill("n1", 4)  # it was being started when the driver died
    resumed.start("n1", 5)
    resumed.report("n1", joined_as="n1")
    order, _ = resumed.order("n1-m")
    assert (order.killed, order.incarnation) == (4, 5)
    assert resumed.lost == []


def test_a_node_that_does_not_come_back_in_time_is_no_host_any_more(resumed: Site) -> None:
    resumed.nodes.adopt("n1", 1, 4711, resumed.lost.append)
    resumed.report("n1-2", joined_as="n1-2")
    resumed.renew("n1-2-m")
    eventually(
        lambda: resumed.renew("n1-2-m") or resumed.hosts() == (("n1-2", 3),),
        within=5,
        what="the other one is given up",
    )
    assert resumed.lost == ["node n1 has not come back to the resumed driver"]
    assert resumed.report("n1", joined_as="n1").name == "n1", "later it may come all the same"


def test_the_servers_own_node_is_not_awaited_and_its_agents_are_adopted(resumed: Site) -> None:
    resumed.nodes.adopt("server", 1, 4711, resumed.lost.append)
    assert resumed.own.calls == [("adopt", "server", 1, 4711)]


def test_a_node_that_comes_back_when_the_job_is_over_is_told(resumed: Site) -> None:
    resumed.nodes.job_ends(3, "it failed")
    resumed.report("n1", joined_as="n1")
    assert resumed.order("n1-m")[0].over == JobOver(3, "it failed")


def test_one_address_joins_no_end_of_nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "OF_PEER", 2)
    first, _ = site.report("one"), site.report("two")
    with pytest.raises(RequestError, match="2 nodes have joined from localhost"):
        site.report("three")
    assert site.report("one", leaves=True, reason="enough") == first
    assert site.report("three").name == "three"
