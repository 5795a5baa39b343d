from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rendezvous.auth import (
    DRIVER,
    Caller,
    Role,
    Tokens,
    agent_token,
    bearer,
    job_token,
    jobs_token,
    make_token,
    node_token,
    operator_token,
    own_token,
    read_token_file,
    reader_token,
    worker_token,
    write_token_file,
)
from rendezvous.errors import TokenError


def test_a_token_survives_the_way_through_its_file(tmp_path: Path) -> None:
    token = make_token()
    path = write_token_file(tmp_path / "token", token)
    assert read_token_file(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_token_is_new() -> None:
    assert len({make_token() for _ in range(100)}) == 100


def test_the_file_is_private_whatever_the_umask_and_replaced_whole(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_token_file(tmp_path / "token", "old")
        write_token_file(path, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token_file(path) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_token_file(tmp_path / "token", "secret")
    path.chmod(mode)
    with pytest.raises(TokenError, match=f"mode {mode:04o}") as caught:
        read_token_file(path)
    assert "secret" not in str(caught.value)


def test_a_missing_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="No such file"):
        read_token_file(tmp_path / "none")
    with pytest.raises(TokenError, match="is empty"):
        read_token_file(write_token_file(tmp_path / "empty", ""))


def test_a_file_that_holds_no_text_is_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe\x00")
    path.chmod(0o600)
    with pytest.raises(TokenError, match="holds no token"):
        read_token_file(path)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="cannot write the token file"):
        write_token_file(tmp_path / "none" / "token", "t")


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),
        ("Bearer  secret ", True),
        ("Bearer secret2", False),
        ("Bearer ", False),
        ("Basic secret", False),
        ("secret", False),
        ("Bearer s\udcffcret", False),
        ("", False),
        (None, False),
    ],
)
def test_only_the_right_token_opens(header: str | None, allowed: bool) -> None:
    tokens = Tokens("secret", {"other": Role.NODE})
    assert tokens.identify(header) == (DRIVER if allowed else None)
    assert tokens.identify("Bearer other") == Caller(Role.NODE)


def test_what_clients_send_is_what_the_server_accepts() -> None:
    token = make_token()
    assert Tokens(token).identify(bearer(token)) == DRIVER


OF_A = agent_token("secret", "a")


@pytest.mark.parametrize(
    ("token", "owner"),
    [
        (OF_A, Caller(Role.AGENT, "a")),
        (agent_token("secret", "fe80::1%eth0"), Caller(Role.AGENT, "fe80::1%eth0")),
        (worker_token(OF_A, "a.0.1"), Caller(Role.WORKER, "a.0.1")),
        (worker_token(agent_token("secret", "a.b"), "a.b.0.1"), Caller(Role.WORKER, "a.b.0.1")),
        (node_token("secret", "n-2"), Caller(Role.NODE, "n-2")),
        (job_token("secret", "night"), Caller(Role.JOB, "night")),
        (job_token(jobs_token("secret"), "night"), Caller(Role.JOB, "night")),
        (job_token(job_token("secret", "night"), "other"), Caller(Role.JOB, "night")),
        (operator_token("secret"), Caller(Role.OPERATOR)),
        (reader_token("secret"), Caller(Role.READER)),
        # Those of another job, of another host, of another role, and half ones:
        (agent_token("other", "a"), None),
        (OF_A.replace("agent:a:", "agent:b:"), None),
        (OF_A.replace("agent:a:", "worker:a:"), None),
        (worker_token(OF_A, "b.0.1"), None),
        (worker_token("secret", "a.0.1"), None),
        (reader_token("secret").replace("reader", "operator"), None),
        (OF_A[:-1], None),
        ("agent:a:", None),
        ("driver::", None),
        ("node::", None),
        (jobs_token("secret"), None),
        (job_token("other", "night"), None),
        (job_token("secret", "night").replace("night", "other"), None),
        (":", None),
        ("agent:" + 2000 * "a" + ":", None),
    ],
)
def test_a_derived_token_says_who_its_owner_is(token: str, owner: Caller | None) -> None:
    assert Tokens("secret").identify(bearer(token)) == owner


def test_an_agent_makes_its_own_token_of_the_drivers() -> None:
    assert own_token("secret", "a") == own_token(OF_A, "a") == OF_A
