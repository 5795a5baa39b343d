"""Sessions and codes: whose they are, how long they are good, and how many there may be."""

from __future__ import annotations

import pytest

from rendezvous.auth import Caller, Role
from rendezvous.sessions import CODE_S, MOST_CODES, MOST_SESSIONS, SESSION_S, Sessions, may_act

OPERATOR, READER = Caller(Role.OPERATOR), Caller(Role.READER)


@pytest.mark.parametrize(
    ("token", "session"),
    [
        (Caller(Role.DRIVER), OPERATOR),
        (OPERATOR, OPERATOR),
        (READER, READER),
        (Caller(Role.AGENT, "a"), None),
        (Caller(Role.WORKER, "a.0.1"), None),
        (Caller(Role.NODE, "n"), None),
    ],
)
def test_a_session_has_the_rights_of_an_operator_or_a_reader(
    token: Caller, session: Caller | None
) -> None:
    sessions = Sessions()
    begun, code = sessions.begin(token, 0.0), sessions.make_code(token, 0.0)
    if session is None:
        assert begun is None
        assert code is None
        return
    assert begun is not None
    assert code is not None
    secret, owner = begun
    assert owner == session
    assert sessions.caller({sessions.cookie: secret}, 1.0) == session
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
    begun = sessions.begin(READER, 0.0)
    assert begun is not None
    cookies = {sessions.cookie: begun[0]}
    assert sessions.caller(cookies, SESSION_S - 1.0) == READER
    assert sessions.caller(cookies, SESSION_S) is None
    assert sessions.caller(cookies, 1.0) is None, "it is forgotten"
    assert sessions.caller({sessions.cookie: "x" * 65}, 0.0) is None
    assert sessions.caller({"elastic_other": begun[0]}, 0.0) is None


def test_a_session_that_was_ended_is_unknown() -> None:
    sessions = Sessions()
    begun = sessions.begin(READER, 0.0)
    assert begun is not None
    sessions.end({sessions.cookie: begun[0]})
    assert sessions.caller({sessions.cookie: begun[0]}, 0.0) is None


def test_readers_push_out_no_operator() -> None:
    sessions = Sessions()
    begun, code = sessions.begin(OPERATOR, 0.0), sessions.make_code(OPERATOR, 0.0)
    for _ in range(MOST_SESSIONS + 1):
        sessions.begin(READER, 0.0)
        sessions.make_code(READER, 0.0)
    assert begun is not None
    assert sessions.caller({sessions.cookie: begun[0]}, 1.0) == OPERATOR
    assert sessions.redeem(code or "", 1.0) == OPERATOR


def test_the_oldest_session_makes_room() -> None:
    sessions = Sessions()
    begun = [sessions.begin(READER, 0.0) for _ in range(MOST_SESSIONS + 1)]
    callers = [sessions.caller({sessions.cookie: each[0]}, 1.0) for each in begun if each]
    assert callers == [None, *[READER] * MOST_SESSIONS]
    codes = [sessions.make_code(READER, 0.0) or "" for _ in range(MOST_CODES + 1)]
    assert [sessions.redeem(code, 1.0) for code in codes] == [None, *[READER] * MOST_CODES]


def test_only_our_page_acts_by_cookie() -> None:
    assert may_act("GET", {})
    assert not may_act("POST", {"Content-Type": "text/plain"})
    assert may_act("POST", {"X-Elastic": "page"})
