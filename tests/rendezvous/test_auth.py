from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastic_driver import token_roles
from elastic_driver.token_roles import (
    agent_token,
    job_token,
    jobs_token,
    node_token,
    own_token,
    worker_token,
)
from rendezvous.auth import (
    DRIVER,
    Caller,
    Role,
    Tokens,
    bearer,
    make_token,
    operator_token,
    read_token_file,
    reader_token,
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
    tokens = Tokens("secret", {"other": token_roles.NODE}, token_roles.ALL)
    assert tokens.identify(header) == (DRIVER if allowed else None)
    assert tokens.identify("Bearer other") == Caller(token_roles.NODE)


def test_what_clients_send_is_what_the_server_accepts() -> None:
    token = make_token()
    assert Tokens(token).identify(bearer(token)) == DRIVER


OF_A = agent_token("secret", "a")


@pytest.mark.parametrize(
    ("token", "owner"),
    [
        (OF_A, Caller(token_roles.AGENT, "a")),
        (agent_token("secret", "fe80::1%eth0"), Caller(token_roles.AGENT, "fe80::1%eth0")),
        (worker_token(OF_A, "a.0.1"), Caller(token_roles.WORKER, "a.0.1")),
        (
            worker_token(agent_token("secret", "a.b"), "a.b.0.1"),
            Caller(token_roles.WORKER, "a.b.0.1"),
        ),
        (node_token("secret", "n-2"), Caller(token_roles.NODE, "n-2")),
        (job_token("secret", "night"), Caller(token_roles.JOB, "night")),
        (job_token(jobs_token("secret"), "night"), Caller(token_roles.JOB, "night")),
        (job_token(job_token("secret", "night"), "other"), Caller(token_roles.JOB, "night")),
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
    assert Tokens("secret", roles=token_roles.ALL).identify(bearer(token)) == owner


def test_a_role_that_the_server_does_not_know_has_no_tokens() -> None:
    tokens = Tokens("secret", roles=[token_roles.NODE])
    assert tokens.identify(bearer(node_token("secret", "n"))) == Caller(token_roles.NODE, "n")
    assert tokens.identify(bearer(OF_A)) is None
    assert tokens.identify(bearer(reader_token("secret"))) == Caller(Role.READER)


def test_tokens_are_those_of_earlier_versions() -> None:
    """A driver of this version goes on with agents and workers that have theirs already."""
    proofs = {
        OF_A: "agent:a:fc8d40136b4c97fdcc2c422356696d5dc16efcae5d76eed4206037a5656542ae",
        node_token("secret", "n"): (
            "node:n:aaa57fb9bd2f857e03e8edb46e5def2482fa2c8e222901e20e0ee03f384d8904"
        ),
        worker_token(OF_A, "a.0.1"): (
            "worker:a.0.1:a204d408f3ca3c89cf85c8c45555a06dcd7271a8cd2128bf0b9ccb852d82ca1e"
        ),
        operator_token("secret"): (
            "operator::199d9aaab07e85221741cc050c9113d3c5267aca2d77745112aecbf3e0a1c810"
        ),
        job_token("secret", "night"): (
            "job:night:f08530efd04169178c5132073dac6a1eb750739d5915273b6eb9dae2bedba7fe"
        ),
    }
    assert all(made == expected for made, expected in proofs.items())


def test_an_agent_makes_its_own_token_of_the_drivers() -> None:
    assert own_token("secret", "a") == own_token(OF_A, "a") == OF_A
