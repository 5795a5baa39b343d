"""Rights: each role may do what its rows say, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_driver import token_roles
from elastic_driver.runtime.api import ROUTES, job_access
from elastic_driver.token_roles import JOB_LEASE_S, KEYS, RoundMembers, agent_token, worker_token
from rendezvous import auth
from rendezvous.auth import Caller, Role
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, SealedError
from rendezvous.server import RendezvousServer
from rendezvous.wire import (
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    DeletePrefix,
    Get,
    Operation,
    Set,
    Watch,
    Written,
)
from tests.rendezvous.common import TOKEN, error_of, request
from tests.rights.tables import routes_table, tables

AGENT = Caller(token_roles.AGENT, "a")
WORKER = Caller(token_roles.WORKER, "a.0.1")
OPERATOR, READER, NODE = Caller(Role.OPERATOR), Caller(Role.READER), Caller(token_roles.NODE, "n")
JOB = Caller(token_roles.JOB, "night")
ALL = {AGENT, WORKER, OPERATOR, READER, NODE, JOB}
ROUNDS = RoundMembers()  # the worker is a member of round 7, and round 5 is over
ROUNDS.publish(7, ["a.0.1", "b.0.1"])
ROUNDS.admit(8, ["b.0.1"])
ROUNDS.seal(5)
ACCESS = job_access(ROUNDS)

# A key, who may write it, and who may read it.
RIGHTS: tuple[tuple[str, set[Caller], set[Caller]], ...] = (
    ("job/world", set(), {AGENT, WORKER, NODE}),
    ("job/anything/below", set(), {AGENT, WORKER, NODE}),
    ("agents/a.1/orders/1", set(), {AGENT}),
    ("agents/a.1/lease", {AGENT}, {AGENT}),
    ("agents/a.12/heartbeat", {AGENT}, {AGENT}),
    ("agents/b.1/lease", set(), set()),
    ("agents/a.b.1/lease", set(), set()),
    ("agents/b.1/orders/1", set(), set()),
    ("agents/a", set(), set()),
    ("workers/a.0.1/lease", {WORKER}, {WORKER}),
    ("workers/a.0.1/progress", {WORKER}, {WORKER}),
    ("workers/a.0.10/lease", set(), set()),
    ("workers/a.1.1/progress", set(), set()),
    ("rounds/7/anything", {WORKER}, {WORKER}),
    ("rounds/7", set(), {WORKER}),
    ("rounds/07/anything", set(), {WORKER}),
    ("rounds/8/anything", set(), {WORKER}),
    ("rounds/9/anything", set(), {WORKER}),
    ("rounds/5/anything", {WORKER}, {WORKER}),  # where the store says that it is sealed
    ("rounds//7/", set(), {WORKER}),
    ("checks/spec", set(), {AGENT, WORKER}),
    ("checks/machines/x", {WORKER}, {WORKER}),
    ("checks/machine_locks/x", {WORKER}, {WORKER}),
    ("checks/assignments/a.0.1/1", set(), {WORKER}),
    ("checks/assignments/a.0.2/1", set(), set()),
    ("nodes/n/session/lease", {NODE}, {NODE}),
    ("nodes/a/session/lease", set(), set()),
    ("nodes/n2/session/lease", set(), set()),
    ("mine/key", {WORKER, OPERATOR}, {WORKER, OPERATOR}),
    ("jobs/night/grant", set(), {JOB}),
    ("jobs/night/lease", {JOB}, {JOB}),
    ("jobs/night/other", set(), set()),
    ("jobs/other/grant", set(), set()),
    ("jobs/other/lease", set(), set()),
    ("jobs/key", set(), set()),
    ("jobsite/key", {WORKER, OPERATOR}, {WORKER, OPERATOR}),
    ("job", {WORKER, OPERATOR}, {WORKER, OPERATOR}),
)


def allowed(operations: Sequence[Operation]) -> set[Caller]:
    """Return the callers, beside the driver, that may carry these out."""
    return {caller for caller in ALL if ACCESS.refused(caller, operations) is None}


@pytest.mark.parametrize(("key", "writers", "readers"), RIGHTS)
def test_each_key_is_written_and_read_by_those_who_may(
    key: str, writers: set[Caller], readers: set[Caller]
) -> None:
    writes = (
        *(Set(key), Set(key, lease=1.0), Add(key, 1), Append(key, b""), Delete(key)),
        CompareSet(key, None, b""),
    )
    for write in writes:
        is_bare = isinstance(write, Delete) or (isinstance(write, Set) and write.lease)
        assert allowed([write]) == writers - (set() if is_bare else {JOB}), write
    for read in (Get((key,)), Get(("mine/key", key)), Watch({key: 0})):
        assert allowed([read]) == readers - (
            set() if len(read.keys) == 1 else {AGENT, NODE, JOB}
        ), read
    assert allowed([Get(("job/world",)), Set(key)]) <= writers, "one wrong operation is enough"


NOBODYS = ("job/", "agents/a.1/orders/", "checks/", "checks/assignments/a.0.1/", "jobs/x/grant")


def test_keys_that_the_driver_writes_itself_are_written_by_no_request() -> None:
    assert {row.prefix.replace("{own}", "a.1") for row in KEYS if not row.writers} == {
        *("job/", "agents/a.1/orders/", "checks/", "checks/assignments/a.1/", "jobs/a.1/grant"),
        "rounds/",
    }
    for prefix in NOBODYS:
        key = f"{prefix}1"
        for write in (Set(key), Add(key, 1), Append(key, b""), Delete(key), DeletePrefix(key)):
            for caller in (auth.DRIVER, *ALL):
                said = ACCESS.refused(caller, [Get(("job/spec",)), write])
                assert said is not None, (caller, write)
        said = ACCESS.refused(auth.DRIVER, [CompareSet(key, None, b"")])
        assert said == f"no request may write {key!r}: the driver does that itself"
        assert ACCESS.refused(auth.DRIVER, [Get((key,)), Watch({key: 0}), Count(key)]) is None
    for prefix in ("", "j", "job", "job/", "agents/", "agents/a", "agents/a.1/", "agents/a.1/o"):
        for seal in (False, True):
            said = ACCESS.refused(auth.DRIVER, [DeletePrefix(prefix, seal=seal)])
            assert said == (
                f"no request may delete what is below {prefix!r}: the driver does that itself"
            )
    for prefix in ("check", "checks/machines", "jobs/x/", "rounds/", "rounds/7"):
        assert ACCESS.refused(auth.DRIVER, [DeletePrefix(prefix)]) is not None, prefix
    for mine in ("rounds/7/", "workers/", "workers/a.0.1/", "nodes/n/", "checks/machines/", "mine"):
        assert ACCESS.refused(auth.DRIVER, [DeletePrefix(mine), Set(f"{mine}x")]) is None, mine
    assert ACCESS.refused(auth.DRIVER, [Set("agents/a.1/lease"), Set("jobs/x/lease")]) is None


@pytest.mark.parametrize(
    ("operation", "may"),
    [
        (Set("jobs/night/lease", lease=JOB_LEASE_S), True),
        (Delete("jobs/night/lease"), True),
        (Set("jobs/night/lease", lease=JOB_LEASE_S + 1), False),
        (Set("jobs/night/lease"), False),
        (Set("jobs/night/lease", b"x", lease=1.0), False),
        (Append("jobs/night/lease", b"x" * 1000), False),
        (Add("jobs/night/lease", 1), False),
        (CompareSet("jobs/night/lease", None, b"x"), False),
    ],
)
def test_a_job_leaves_nothing_in_the_store_of_its_brain(operation: Operation, may: bool) -> None:
    """Who may start jobs has the token of any name: each would keep its share of the store."""
    assert (job_access().refused(JOB, [operation]) is None) is may


def test_many_keys_are_all_looked_at() -> None:
    round_keys = tuple(f"rounds/3/{n}" for n in range(100))
    assert allowed([Get(round_keys)]) == {WORKER}
    for wrong in ("agents/a.1/orders/1", "workers/a.1.1/lease", "zzz/key", "nodes/x/lease"):
        may = {WORKER} if wrong == "zzz/key" else set()
        assert allowed([Get((*round_keys[:50], wrong, *round_keys[50:]))]) == may


@pytest.mark.parametrize(
    ("prefix", "deleters", "counters"),
    [
        ("mine/", {WORKER, OPERATOR}, {WORKER, OPERATOR}),
        ("min", {WORKER, OPERATOR}, {WORKER, OPERATOR}),
        ("rounds/3/", set(), {WORKER}),
        ("workers/a.0.1/", set(), {WORKER}),
        ("agents/", set(), set()),
        ("nod", set(), set()),
        ("j", set(), set()),
        ("job", set(), set()),
    ],
)
def test_what_is_below_a_prefix_belongs_to_somebody(
    prefix: str, deleters: set[Caller], counters: set[Caller]
) -> None:
    assert allowed([DeletePrefix(prefix)]) == deleters
    sealers = {caller for caller in deleters if caller.role is Role.OPERATOR}
    assert allowed([DeletePrefix(prefix, seal=True)]) == sealers, "a worker ends no keys of others"
    assert allowed([Count(prefix)]) == counters
    assert allowed([Count()]) == set()


def test_a_route_of_no_row_is_the_drivers() -> None:
    assert ACCESS.may_call(auth.DRIVER, "POST", "/v1/anything")
    assert not any(ACCESS.may_call(caller, "POST", "/v1/anything") for caller in ALL)
    assert not any(ACCESS.may_call(caller, "PUT", "/v1/status") for caller in ALL)


def test_only_operators_steer_and_readers_only_look() -> None:
    steering = [row for row in ROUTES if row.template in ("/v1/scale", "/v1/stop", "/v1/stacks")]
    assert len(steering) == 3
    assert all(row.roles == {Role.OPERATOR} for row in steering)
    read = {(row.method, row.template) for row in ROUTES if Role.READER in (row.roles or ())}
    assert {path for method, path in read if method != "GET"} == {"/logout"}
    assert {"/v1/status", "/metrics", "/v1/events"} <= {path for _, path in read}
    assert not any(Role.READER in row.writers | row.readers for row in KEYS)


def test_the_page_of_security_has_the_tables_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    assert tables() in page, "put in what python -m tests.rights.tables prints"


def test_the_page_of_the_protocol_has_the_table_of_the_routes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert routes_table() in page, "put in what python -m tests.rights.tables prints"


# ---- over HTTP ---------------------------------------------------------------------------


def test_no_token_writes_what_agents_and_workers_start_over_http(server: RendezvousServer) -> None:
    for token in (TOKEN, auth.operator_token(TOKEN), agent_token(TOKEN, "a")):
        for key in ("job/spec", "job/world", "agents/a.1/orders/1"):
            for method in ("PUT", "DELETE"):
                status, _, body = request(server, method, f"/v1/kv/{key}", b"x", token=token)
                assert status == 403, (token, key)
                assert error_of(body)["code"] == "forbidden"
        with RendezvousClient(server.url, token) as client:
            with pytest.raises(RequestError, match="403"):
                client.batch(Get(("job/spec",)), Set("job/spec", b"x"))
            with pytest.raises(RequestError, match="403"):
                client.batch(DeletePrefix("job/", seal=True))
    server.apply([Set("job/spec", b"the driver's own")])
    assert request(server, "GET", "/v1/kv/job/spec")[2] == b"the driver's own"


def test_a_refused_request_changes_nothing_and_says_why(
    server: RendezvousServer, client: RendezvousClient
) -> None:
    agent = agent_token(TOKEN, "a")
    server.apply([Set("agents/a.1/orders/1", b"the driver's")])
    with RendezvousClient(server.url, worker_token(agent, "a.0.1")) as worker:
        with pytest.raises(RequestError, match=r"403 forbidden: .*worker.*agents/a.1/orders/1"):
            worker.batch(Set("mine/key", b"1"), Set("agents/a.1/orders/1", b"mine"))
        assert worker.get("mine/key") is None, "nothing of that batch was carried out"
        assert worker.one(Set("mine/key", b"2"), Written), "and the connection goes on"
    entry = client.get("agents/a.1/orders/1")
    assert entry is not None
    assert entry.value == b"the driver's"


def test_a_worker_writes_keys_of_its_own_round_only(
    server: RendezvousServer, rounds: RoundMembers
) -> None:
    clients = {
        name: RendezvousClient(server.url, worker_token(agent_token(TOKEN, "a"), name))
        for name in ("a.0.1", "a.1.1")
    }
    member, other = clients["a.0.1"], clients["a.1.1"]
    rounds.publish(3, ["a.0.1"])
    member.set("rounds/3/x", b"1")
    assert other.get("rounds/3/x") is not None, "it may look"
    with pytest.raises(RequestError, match=r"403 forbidden: .*a\.1\.1 is no member of that round"):
        other.set("rounds/3/x", b"2")
    with pytest.raises(RequestError, match=r"403 .*docs/security\.md"):
        member.set("rounds/4/x", b"1")
    rounds.publish(4, ["a.1.1"])
    member.set("rounds/3/x", b"2")  # it may still be in that round
    server.post([DeletePrefix("rounds/3/", seal=True)])
    rounds.seal(3)
    for client in clients.values():
        with pytest.raises(SealedError):
            client.set("rounds/3/x", b"3")
        client.close()


def test_single_keys_have_the_same_rights(server: RendezvousServer) -> None:
    worker = worker_token(agent_token(TOKEN, "a"), "a.0.1")
    for method in ("GET", "PUT", "DELETE"):
        status, _, body = request(server, method, "/v1/kv/agents/a.1/lease", b"", token=worker)
        assert (status, error_of(body)["code"]) == (403, "forbidden")
    assert request(server, "PUT", "/v1/kv/mine/key", b"1", token=worker)[0] == 204
    assert request(server, "GET", "/v1/kv/mine/key", token=worker)[2] == b"1"
    assert request(server, "GET", "/v1/kv/mine/key", token=auth.reader_token(TOKEN))[0] == 403
    assert request(server, "GET", "/v1/kv/mine/key", token="worker:a.0.1:00")[0] == 401
    assert request(server, "GET", "/no/such/route", token=worker)[0] == 404


def test_a_connection_may_show_one_token_after_the_other(server: RendezvousServer) -> None:
    worker = worker_token(agent_token(TOKEN, "a"), "a.0.1")
    with RendezvousClient(server.url, worker) as client:
        client.set("mine/key", b"1")
        for token, status in ((worker[:-1] + "x", 401), (TOKEN, 200), (worker, 403)):
            body = b'{"operations":[{"type":"count"}],"request_id":"x"}'
            assert request(server, "POST", "/v1/kv:batch", body, token=token)[0] == status
