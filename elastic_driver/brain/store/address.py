"""The address of a statistics database: `--stats-db URL`, or a file in the run's folder. Pure."""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from elastic_driver.masking import without_password

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


class Address(NamedTuple):
    """A database: a file (SQLite), or the URL of PostgreSQL without what is secret in it."""

    file: str = ""
    url: str = ""  # with the password, if there is one in it; never shown

    def __str__(self) -> str:
        return self.file or without_password(self.url.partition("?")[0])

    def __repr__(self) -> str:
        return f"Address({self})"


def read_address(text: str) -> Address:
    """Return the database that `--stats-db` names; raises ValueError with a phrase."""
    if "\0" in unquote(text):
        raise ValueError("has a zero byte")
    if text.startswith(_SQLITE) and len(text) > len(_SQLITE):
        return Address(file=unquote(text.removeprefix(_SQLITE)))
    if not text.startswith(_POSTGRES):
        raise ValueError("is postgresql://USER@HOST/DATABASE or sqlite:///FILE")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from None
    if "@" in parts.netloc.rpartition("@")[0]:
        raise ValueError("has an @ in its user or password; write %40 in its place")
    try:
        _port = parts.port
    except ValueError:
        raise ValueError("has a port that is no number from 0 to 65535") from None
    for port in parse_qs(parts.query).get("port", ()):
        if not port.replace(",", "").isdecimal():  # a list for several hosts
            raise ValueError(f"has port={port[:20]}, which is no number")
    if len(parts.path) < 2 or "/" in parts.path[1:]:
        raise ValueError("names no database: postgresql://USER@HOST/DATABASE")
    return Address(url=text)
