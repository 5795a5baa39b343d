"""Rows of rights: the default of a server that is given none, and what the parts of a table do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver import token_roles
from elastic_driver.token_roles import agent_token, worker_token
from rendezvous import auth
from rendezvous.access import NOBODY, Access, BareLease, KeyRights, Reason, RouteRights
from rendezvous.auth import Caller, Role
from rendezvous.server import RendezvousServer
from rendezvous.wire import BATCH_PATH, Append, Count, Delete, DeletePrefix, Get, Set
from tests.rendezvous.common import STORE, TOKEN, error_of, request

EVERYBODY = frozenset({Role.OPERATOR, Role.READER, *token_roles.ALL})
OTHERS = [Caller(role, "x") for role in EVERYBODY]
WRITERS = [caller for caller in OTHERS if caller.role is not Role.READER]
TEAM = frozenset({token_roles.WORKER})


def test_without_a_table_every_token_uses_the_store_and_nothing_else() -> None:
    access = Access(STORE)
    for caller in OTHERS:
        assert access.may_call(caller, "POST", BATCH_PATH)
        assert access.may_post(caller, BATCH_PATH)
        assert access.refused(caller, [Get(("any/key",)), Count(), Count("any/")]) is None
        assert not access.may_call(caller, "GET", "/of/others")
        assert not access.may_post(caller, "/of/others")
        assert access.refused(caller, [DeletePrefix("any/", seal=True)]) is not None
        may_write = access.refused(caller, [Set("any/key"), DeletePrefix("any/")]) is None
        assert may_write is (caller in WRITERS)
    assert access.may_call(auth.DRIVER, "GET", "/of/others")
    assert access.may_post(auth.DRIVER, "/of/others")
    assert access.refused(auth.DRIVER, [DeletePrefix("any/", seal=True)]) is None
    assert access.system == ()


def test_a_server_without_a_table_refuses_what_is_not_the_store(server: RendezvousServer) -> None:
    reader = auth.reader_token(TOKEN)
    worker = worker_token(agent_token(TOKEN, "a"), "a")
    assert request(server, "PUT", "/v1/kv/any/key", b"1", worker)[0] == 204
    assert request(server, "GET", "/v1/kv/any/key", None, reader)[2] == b"1"
    status, _, body = request(server, "PUT", "/v1/kv/any/key", b"2", reader)
    assert (status, error_of(body)["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("/sets/a:next", True),
        ("/sets/a:done", False),
        ("/sets/a:next:next", False),
        ("/sets/a/b:next", False),
        ("/sets/a", False),
        ("/plain", True),
        ("/plain/", False),
        ("/looked_at", False),
    ],
)
def test_a_post_is_found_by_the_path_that_was_requested(path: str, may: bool) -> None:
    routes = (
        RouteRights("POST", "/sets/{set}:next", TEAM),
        RouteRights("POST", "/plain", TEAM),
        RouteRights("GET", "/looked_at", TEAM),
    )
    access = Access(replace(STORE, routes=routes))
    assert access.may_post(Caller(token_roles.WORKER, "w"), path) is may
    assert not access.may_post(Caller(token_roles.NODE, "n"), path)


def test_a_name_in_a_key_is_the_callers_as_the_table_says() -> None:
    keys = (KeyRights("by/{own}/", EVERYBODY, EVERYBODY, ""),)
    access = Access(replace(STORE, keys=keys, owner_of={token_roles.NODE: str.upper}))
    worker, node = Caller(token_roles.WORKER, "ME"), Caller(token_roles.NODE, "ME")
    assert access.refused(worker, [Set("by/ME/1")]) is None
    assert access.refused(worker, [Set("by/me/1")]) is not None
    assert access.refused(node, [Set("by/me/1")]) is None
    assert access.refused(node, [Set("by/you/1")]) is not None
    assert access.system == ("by/",)


def test_members_of_a_group_write_and_others_hear_why_they_do_not() -> None:
    keys = (KeyRights("club/{joined}/", TEAM, TEAM, ""), KeyRights("club/", NOBODY, TEAM, ""))
    reasons = (Reason(token_roles.WORKER, "club/", "has no card"),)
    table = replace(STORE, keys=keys, reasons=reasons)
    access = Access(table, lambda caller, group: (caller, group) == ("w", "3"))
    member, other = Caller(token_roles.WORKER, "w"), Caller(token_roles.WORKER, "v")
    assert access.refused(member, [Set("club/3/x")]) is None
    assert access.refused(other, [Get(("club/3/x",))]) is None
    said = "a token of role worker may not write 'club/3/x': v has no card"
    assert access.refused(other, [Set("club/3/x")]) == said
    assert Access(table).refused(member, [Set("club/3/x")]) is not None, "nobody is a member"


def test_a_role_may_be_held_to_leases_without_a_value() -> None:
    access = Access(replace(STORE, bare_leases=(BareLease(token_roles.JOB, 5.0),)))
    job = Caller(token_roles.JOB, "j")
    assert access.refused(job, [Set("a/b", lease=5.0), Delete("a/b")]) is None
    said = "the lease of a job has no value and lasts 5 s at most"
    for wrong in (
        Set("a/b"),
        Set("a/b", lease=6.0),
        Set("a/b", b"x", lease=1.0),
        Append("a/b", b""),
    ):
        assert access.refused(job, [wrong]) == said
    assert access.refused(Caller(token_roles.NODE, "n"), [Set("a/b", b"x")]) is None
