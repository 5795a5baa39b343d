"""The address of a statistics database, and what is shown of it."""

from __future__ import annotations

import pytest

from elastic_driver.brain.store.address import Address, read_address


def test_a_file_has_an_absolute_or_a_relative_path() -> None:
    assert read_address("sqlite:////var/lib/stats.db") == Address(file="/var/lib/stats.db")
    assert read_address("sqlite:///stats.db").file == "stats.db"


def test_a_password_is_not_shown() -> None:
    address = read_address("postgresql://ann:p%40ss@db:5432/stats?sslmode=require&password=p")
    assert str(address) == "postgresql://ann:***@db:5432/stats"
    assert "p%40ss" not in repr(address)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stats.db",
        "sqlite://",
        "sqlite:///",
        "mysql://h/db",
        "postgresql://h",
        "postgresql://h/",
    ],
)
def test_another_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"postgresql://USER@HOST/DATABASE"):
        read_address(text)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="port"):
        read_address("postgresql://h:99999/db")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("postgresql://ann:p@ss@db/stats", "write %40"),
        ("postgresql://[::1/stats", "is no URL"),
        ("sqlite:///x%00y", "zero byte"),
        ("postgresql://db/st%00ats", "zero byte"),
        ("postgresql://db/stats?port=many", "port=many"),
    ],
)
def test_what_is_wrong_with_an_address_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        read_address(text)
    assert "p@ss" not in str(raised.value)
