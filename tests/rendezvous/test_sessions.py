"""Sessions and codes: whose they are, how long they are good, and how many there may be."""

from __future__ import annotations

import pytest

from elastic_driver import token_roles
from rendezvous.auth import Caller, Role
from rendezvous.sessions import CODE_S, MOST_CODES, MOST_SESSIONS, SESSION_S, Begun, Sessions

OPERATOR, READER = Caller(Role.OPERATOR), Caller(Role.READER)


def begin(sessions: Sessions, caller: Caller, cookies: dict[str, str] | None = None) -> Begun:
    begun = sessions.begin(caller, cookies or {}, 0.0)
    assert begun is not None
    return begun


def caller(sessions: Sessions, begun: Begun, now: float = 1.0) -> Caller | None:
    found = sessions.find({sessions.cookie: begun.cookie}, begun.key, now)
    return None if found is None else Caller(found.caller.role)


@pytest.mark.parametrize(
    ("token", "session"),
    [
        (Caller(Role.DRIVER), OPERATOR),
        (OPERATOR, OPERATOR),
        (READER, READER),
        (Caller(token_roles.AGENT, "a"), None),
        (Caller(token_roles.WORKER, "a.0.1"), None),
        (Caller(token_roles.NODE, "n"), None),
    ],
)
def test_a_session_has_the_rights_of_an_operator_or_a_reader(
    token: Caller, session: Caller | None
) -> None:
    sessions = Sessions()
    code = sessions.make_code(token, 0.0)
    if session is None:
        assert sessions.begin(token, {}, 0.0) is None
        assert code is None
        return
    assert code is not None
    begun = begin(sessions, token)
    assert begun.caller.role is session.role
    assert begun.caller != begin(sessions, token).caller, "each is a client of its own"
    assert caller(sessions, begun) == session
    assert sessions.redeem(code, 1.0) == session


def test_a_code_is_good_once_and_for_a_while() -> None:
    sessions = Sessions()
    first, second = (sessions.make_code(OPERATOR, 0.0) for _ in range(2))
    assert first is not None
    assert second is not None
    assert sessions.redeem(first, CODE_S - 1.0) == OPERATOR
    assert sessions.redeem(first, CODE_S - 1.0) is None
    assert sessions.redeem(second, CODE_S) is None
    assert sessions.redeem("", 0.0) is None


def test_a_session_ends_twelve_hours_after_the_login_however_it_is_used() -> None:
    sessions = Sessions()
    begun = begin(sessions, READER)
    assert caller(sessions, begun, SESSION_S - 1.0) == READER
    assert caller(sessions, begun, SESSION_S) is None
    assert caller(sessions, begun) is None, "it is forgotten"


def test_cookie_and_key_count_together_only() -> None:
    sessions = Sessions()
    one, two = begin(sessions, OPERATOR), begin(sessions, READER)
    cookies = {sessions.cookie: one.cookie}
    assert one.key != one.cookie
    for key in ("", "x", one.cookie, two.key, "x" * 65):
        assert sessions.find(cookies, key, 1.0) is None
    for wrong in ({}, {sessions.cookie: ""}, {sessions.cookie: one.key}, {"other": one.cookie}):
        assert sessions.find(wrong, one.key, 1.0) is None
    assert sessions.find({sessions.cookie: two.cookie}, one.key, 1.0) is None
    assert caller(sessions, one) == OPERATOR


def test_tabs_of_a_browser_share_a_cookie_and_have_a_key_each() -> None:
    sessions = Sessions()
    one = begin(sessions, OPERATOR)
    two = begin(sessions, READER, {sessions.cookie: one.cookie})
    assert two.cookie == one.cookie
    assert two.key != one.key
    assert caller(sessions, one) == OPERATOR
    assert caller(sessions, two) == READER
    planted = begin(sessions, READER, {sessions.cookie: "of somebody else"})
    assert planted.cookie != "of somebody else", "only a cookie of ours goes on"


def test_a_session_that_ends_takes_those_of_its_browser_and_their_requests_with_it() -> None:
    sessions, cut = Sessions(), list[str]()
    one = begin(sessions, READER)
    two = begin(sessions, READER, {sessions.cookie: one.cookie})
    other = begin(sessions, READER)
    for name, begun in (("one", one), ("two", two), ("other", other)):
        found = sessions.find({sessions.cookie: begun.cookie}, begun.key, 1.0)
        assert found is not None
        found.cuts.add(lambda name=name: cut.append(name))  # type: ignore[misc]
        if begun is one:
            ended = found
    sessions.end(ended)
    assert sorted(cut) == ["one", "two"]
    assert [caller(sessions, begun) for begun in (one, two, other)] == [None, None, READER]


def test_readers_push_out_no_operator() -> None:
    sessions = Sessions()
    begun, code = begin(sessions, OPERATOR), sessions.make_code(OPERATOR, 0.0)
    for _ in range(MOST_SESSIONS + 1):
        begin(sessions, READER)
        sessions.make_code(READER, 0.0)
    assert caller(sessions, begun) == OPERATOR
    assert sessions.redeem(code or "", 1.0) == OPERATOR


def test_who_logs_in_without_end_pushes_out_his_own_sessions_alone() -> None:
    sessions, own = Sessions(), MOST_SESSIONS // 4
    other = sessions.begin(READER, {}, 0.0, "10.0.0.9")
    code = sessions.make_code(READER, 0.0, "10.0.0.9") or ""
    begun = [begin(sessions, READER) for _ in range(2 * own)]
    assert [caller(sessions, each) for each in begun] == [None] * own + [READER] * own
    assert other is not None
    assert caller(sessions, other) == READER
    codes = [sessions.make_code(READER, 0.0) or "" for _ in range(MOST_CODES)]
    assert [sessions.redeem(each, 1.0) for each in codes].count(READER) == MOST_CODES // 4
    assert sessions.redeem(code, 1.0) == READER


def test_if_all_have_their_share_the_one_with_the_most_makes_room() -> None:
    sessions, few = Sessions(), MOST_SESSIONS // 8
    first = sessions.begin(READER, {}, 0.0, "first")
    many = [sessions.begin(READER, {}, 0.0, "many") for _ in range(2 * few)]
    for number in range(6 * few):
        assert sessions.begin(READER, {}, 0.0, f"{number % (4 * few)}") is not None
    assert first is not None
    assert caller(sessions, first) == READER
    found = [each is not None and caller(sessions, each) for each in many]
    assert found == [None, *[READER] * (2 * few - 1)]
