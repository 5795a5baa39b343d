"""The address of a statistics database: `--stats-db URL`, or a file in the run's folder. Pure.

PostgreSQL is asked only over TLS, with its certificate checked, and never told a password, unless
the URL says otherwise or names a Unix socket. That holds for 127.0.0.1, too: another user of the
machine may listen at its port while it is down.
"""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from elastic_driver.options import without_password

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")
_REQUIRE_AUTH = 160_000  # the first libpq that knows `require_auth`


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


def safe_parameters(url: str, libpq: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what libpq of this version has to be told so that a false server learns nothing.

    What the URL says stays as it says it; nothing is needed for a Unix socket, whose place other
    users cannot take.
    """
    said = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    if _is_socket(url, said, environ):
        return {}
    proof = ("require_auth", "scram-sha-256")
    if libpq < _REQUIRE_AUTH:  # a server proves itself by SCRAM within this connection's TLS
        proof = ("channel_binding", "require")
    if said.get("sslmode", "").startswith(("disable", "allow", "prefer")) and libpq < _REQUIRE_AUTH:
        return {}  # such a libpq has no word for it
    return {name: value for name, value in (("sslmode", "verify-full"), proof) if name not in said}


def _is_socket(url: str, said: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether all hosts of a URL are Unix sockets."""
    if "hostaddr" in said or "service" in said or environ.get("PGHOSTADDR"):
        return False
    network = urlsplit(url).netloc.rpartition("@")[2]
    hosts = said.get("host") or unquote(network) or environ.get("PGHOST") or "/"
    return all(host.startswith(("/", "@")) for host in hosts.split(","))
