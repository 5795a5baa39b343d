"""A database that the user has named is looked at before the job begins."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.errors import UsageError
from launcher.launch import checks as statistics
from launcher.launch.checks import check_database, check_installed
from tests.support.postgres import postgres, why_not


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"psycopg"}
    monkeypatch.setattr(statistics, "find_spec", lambda name: None if name in missing else 1)
    check_installed(None)
    check_installed(Address(file="x"))
    with pytest.raises(UsageError, match=r"needs psycopg, .* 'elastic-driver\[postgres\]'"):
        check_installed(Address(url="postgresql://h/d"))
    missing.add("sqlalchemy")
    with pytest.raises(UsageError, match=r"needs sqlalchemy, .* 'elastic-driver\[brain\]'"):
        check_installed(Address(file="x"))


def test_a_file_is_made_and_a_missing_folder_refused(tmp_path: Path) -> None:
    check_database(Address(file=str(tmp_path / "x.db")))
    assert (tmp_path / "x.db").exists()
    with pytest.raises(UsageError, match=r"x\.db: No such file or directory"):
        check_database(Address(file=str(tmp_path / "gone" / "x.db")))


def test_a_corrupt_file_and_a_server_that_is_away_do_not_keep_a_job_from_beginning(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.db").write_bytes(b"no database" * 1000)
    check_database(Address(file=str(tmp_path / "x.db")))
    check_database(read_address(f"postgresql://ann@/stats?host={tmp_path}"))


@pytest.mark.parametrize("name", ["file/x.db", "x" * 300])
def test_a_file_that_nobody_can_make_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"(Not a directory|File name too long); mend the address"):
        check_database(Address(file=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("", "failed to resolve host 'no such host'"),
        ("?sslmode=sometimes", 'invalid sslmode value: "sometimes"'),
        ("?colour=red", 'invalid connection option "colour"'),
    ],
)
def test_a_name_or_an_option_that_is_unknown_is_refused(rest: str, why: str) -> None:
    pytest.importorskip("psycopg")
    host = "127.0.0.1" if rest else "no such host"  # a space: no name server is asked
    with pytest.raises(UsageError, match=why) as failed:
        check_database(read_address(f"postgresql://ann@{host}:1/stats{rest}"))
    assert "\n" not in str(failed.value)


def test_mistakes_are_refused_in_a_line_without_the_password() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with postgres() as server:
        check_database(read_address(server.url()))
        for url, why in (
            (server.url(password="wrong"), "password authentication failed"),
            (server.url("missing"), '"missing" does not exist'),
        ):
            with pytest.raises(UsageError, match=why) as failed:
                check_database(read_address(url))
            assert "\n" not in str(failed.value)
            assert "wrong" not in str(failed.value)
