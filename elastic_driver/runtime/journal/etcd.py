"""A client of etcd v3 over its JSON gateway: transactions, ranges and leases.

Several endpoints of one cluster are tried in turn until one answers. A request that got no answer
is sent again, perhaps to another member: callers make their transactions so that the second one
changes nothing. One thread at a time uses a client; `clone` makes one for another thread. Times
are seconds.

User, password and certificates come from files that the environment names (`ACCESS_VARIABLES`,
docs/standby.md), never from the command line. Beyond this machine, and with a password, etcd is
asked over TLS only, unless the user says otherwise: who answers in its place learns the token.
"""

import contextlib
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.reachability import is_loopback
from rendezvous.tls import TlsConnection
from rendezvous.wire import UNREADABLE

SCHEME = "etcd://"
DEFAULT_PORT = 2379
TIMEOUT_S = 5.0  # for a call, all endpoints and repeats together
ATTEMPT_S = 1.5  # for the answer of one member; one without a majority answers late or never
PAUSE_S = 0.1  # after all endpoints have failed
MAX_VALUE = 1024 * 1024  # bytes of a value; etcd takes requests of 1.5 MiB by default
MAX_OPERATIONS = 100  # of a transaction; etcd takes 128 by default
ACCESS_VARIABLES = {
    "ELASTIC_ETCD_CA": "the certificates (PEM) that sign etcd's own; TLS is used if it is set",
    "ELASTIC_ETCD_CERT": "the certificate (PEM) of this client, if etcd asks for one",
    "ELASTIC_ETCD_KEY": "its key (PEM)",
    "ELASTIC_ETCD_USER": "the user, if etcd asks for one",
    "ELASTIC_ETCD_PASSWORD_FILE": "the file that holds the password",
}
PLAIN_VARIABLE = "ELASTIC_ETCD_INSECURE"  # 1: without TLS beyond this machine, too
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?\Z")
# Codes of gRPC. The first four say that this member, or the cluster, cannot answer now.
_CANCELLED, _DEADLINE, _EXHAUSTED, _UNAVAILABLE = 1, 4, 8, 14
_INVALID, _NOT_FOUND, _UNAUTHENTICATED = 3, 5, 16
T = TypeVar("T")


class EtcdError(ClusterError):
    """etcd has refused a request, or did not answer in time."""


class EtcdUnreachableError(EtcdError):
    """No member of the cluster has answered in time, or the cluster has no majority."""


@dataclass(frozen=True)
class EtcdAccess:
    """The endpoints of a cluster, and the files that give access to it."""

    endpoints: tuple[tuple[str, int], ...]
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    _: KW_ONLY
    is_plain_here: bool = False  # without TLS on this machine, and nobody has said that it may be

    def __str__(self) -> str:
        hosts = ((f"[{host}]" if ":" in host else host, port) for host, port in self.endpoints)
        return SCHEME + ",".join(f"{host}:{port}" for host, port in hosts)


def read_access(url: str, environ: Mapping[str, str], *, insecure: bool = False) -> EtcdAccess:
    """Return the cluster of an `etcd://h1:2379,h2:2379`, with the files of the environment.

    `insecure`: without TLS beyond this machine, too. Raises UsageError for a URL without endpoints,
    a file that cannot be read, half a pair, or a connection that others could read.
    """
    endpoints = []
    for word in url.removeprefix(SCHEME).rstrip("/").split(","):
        match = _ENDPOINT.match(word)
        if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65536:
            raise UsageError(f"--journal needs etcd://HOST:PORT,HOST:PORT…, got {url!r}")
        endpoints.append((match[1].strip("[]"), int(match[2] or DEFAULT_PORT)))
    given = {name: environ.get(name, "") for name in ACCESS_VARIABLES}
    for one, other in (
        ("ELASTIC_ETCD_CERT", "ELASTIC_ETCD_KEY"),
        ("ELASTIC_ETCD_USER", "ELASTIC_ETCD_PASSWORD_FILE"),
    ):
        if bool(given[one]) != bool(given[other]):
            raise UsageError(f"{one} and {other} belong together; set both or none")
    if given["ELASTIC_ETCD_CERT"] and not given["ELASTIC_ETCD_CA"]:
        raise UsageError("ELASTIC_ETCD_CERT needs ELASTIC_ETCD_CA, the authority of etcd's own")
    for name, path in given.items():
        if path and not name.endswith("USER"):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise UsageError(f"{name}: cannot read {path}: {error.strerror}") from error
    access = EtcdAccess(tuple(endpoints), *given.values())
    if given["ELASTIC_ETCD_CA"] or insecure or environ.get(PLAIN_VARIABLE) == "1":
        return access
    _check_plain(endpoints, given["ELASTIC_ETCD_USER"])
    return replace(access, is_plain_here=True)


def _check_plain(endpoints: Sequence[tuple[str, int]], user: str) -> None:
    """Raise UsageError if etcd cannot be asked without TLS."""
    hint = "name the CA of etcd's certificate in ELASTIC_ETCD_CA"
    plain = f"--insecure or {PLAIN_VARIABLE}=1 trusts the network"
    for host, _port in endpoints:
        if not (host == "localhost" or is_loopback(host)):
            raise UsageError(
                f"etcd at {host} would learn the job's token without TLS, and others with it; "
                f"{hint} ({plain})"
            )
    if user:
        raise UsageError(f"the password of etcd's user {user} needs TLS; {hint} ({plain})")


# ---- the messages (etcd's rpc.proto, of which we use a part) ------------------------------


class KeyValue(Struct, frozen=True):
    """A key with its value; `lease` is 0 for a key that stays."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    lease: int = 0


class RangeAnswer(Struct, frozen=True):
    """The keys found, in their order."""

    kvs: tuple[KeyValue, ...] = ()


class _OneAnswer(Struct, frozen=True):
    response_range: RangeAnswer = RangeAnswer()


class _Header(Struct, frozen=True):
    revision: int = 0


class TxnAnswer(Struct, frozen=True):
    """The branch that was carried out, and its answers; one of a `put` is empty."""

    header: _Header = _Header()
    succeeded: bool = False
    responses: tuple[_OneAnswer, ...] = ()

    @property
    def revision(self) -> int:
        """The revision of the store; that of the keys which the transaction wrote, if any."""
        return self.header.revision

    def found(self, number: int) -> tuple[KeyValue, ...]:
        """Return the keys that the operation of this number (from 0) has found."""
        return self.responses[number].response_range.kvs


class _Lease(Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class _Stream(Struct, frozen=True):
    result: _Lease = _Lease()


class _Token(Struct, frozen=True):
    token: str = ""


class _Refusal(Struct, frozen=True):
    code: int = 0
    error: str = ""


Operation = dict[str, Any]
Compare = dict[str, Any]


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Write a key."""
    return {"request_put": {"key": key.encode(), "value": value, "lease": lease}}


def delete(key: str, end: str = "") -> Operation:
    """Delete a key, or those from `key` up to, but without, `end`."""
    return {"request_delete_range": {"key": key.encode(), "range_end": end.encode()}}


def find(key: str, end: str = "", *, keys_only: bool = False) -> Operation:
    """Read a key, or those from `key` up to, but without, `end`; in the order of their names."""
    asked = {"key": key.encode(), "range_end": end.encode()}
    return {"request_range": {**asked, "keys_only": keys_only}}


def is_missing(key: str) -> Compare:
    """Compare: there is no such key."""
    return was_created(key, 0)


def was_created(key: str, revision: int) -> Compare:
    """Compare: the key was created at this revision, and has been there ever since."""
    compared = {"key": key.encode(), "target": "CREATE", "result": "EQUAL"}
    return {**compared, "create_revision": revision}


def end_of(prefix: str) -> str:
    """Return the end of the range of all keys with this prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


# ---- the client --------------------------------------------------------------------------


class _Answer(NamedTuple):
    status: int
    body: bytes


class EtcdClient(contextlib.AbstractContextManager["EtcdClient"]):
    """A connection to one member at a time.

    Every call may raise EtcdUnreachableError (no answer within `timeout`) and EtcdError (refused).
    """

    def __init__(self, access: EtcdAccess, timeout: float = TIMEOUT_S) -> None:
        """Read the certificates; raises UsageError if they are not usable."""
        self.access, self.timeout = access, timeout
        self._tls = _tls(access)
        self._first = 0  # the endpoint that is asked first: the last one that answered
        self._connection: HTTPConnection | None = None
        self._token = ""

    def clone(self, timeout: float | None = None) -> "EtcdClient":
        """Return a client for another thread."""
        return EtcdClient(self.access, self.timeout if timeout is None else timeout)

    def transact(
        self,
        compare: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnAnswer:
        """Carry out `success` if all comparisons hold, otherwise `failure`; all or nothing."""
        body = {"compare": compare, "success": success, "failure": failure}
        return self._call("/v3/kv/txn", body, TxnAnswer)

    def range(self, key: str, end: str = "") -> tuple[KeyValue, ...]:
        """Return a key, or those from `key` up to, but without, `end`."""
        return self.transact((), [find(key, end)]).found(0)

    def grant(self, seconds: int) -> int:
        """Return the number of a new lease, which ends after so many seconds."""
        return self._call("/v3/lease/grant", {"TTL": seconds}, _Lease).ID

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; return False if it is over."""
        return self._call("/v3/lease/keepalive", {"ID": lease}, _Stream).result.TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; one that is over is no error."""
        self._call("/v3/lease/revoke", {"ID": lease}, _Lease, missing=_Lease())

    def close(self) -> None:
        """Close the connection; a later call opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call ------------------------------------------------------------------------

    def _call(self, path: str, body: Any, kind: type[T], missing: T | None = None) -> T:
        """Return the answer of the first member that has one; `missing`: that of "not found"."""
        until = time.monotonic() + self.timeout
        encoded, problem, failed = msgspec.json.encode(body), "", 0
        while True:
            if time.monotonic() >= until:
                raise EtcdUnreachableError(
                    f"{self.access} does not answer ({problem}); is a majority of its members "
                    "running, and can this host reach them?"
                )
            try:
                answer = self._attempt(path, encoded, until)
                if answer.status < 400:
                    return msgspec.json.decode(answer.body, type=kind, strict=False)
                refusal = _refusal(answer)
            except (OSError, HTTPException, *UNREADABLE) as error:
                problem = str(error) or type(error).__name__
            else:
                problem = refusal.error
                if refusal.code == _NOT_FOUND and missing is not None:
                    return missing
                self._judge(refusal.code, answer.status, problem)
            self.close()
            self._first = (self._first + 1) % len(self.access.endpoints)
            failed += 1
            if failed % len(self.access.endpoints) == 0:
                time.sleep(min(PAUSE_S, max(0.0, until - time.monotonic())))

    def _judge(self, code: int, status: int, problem: str) -> None:
        """Return if the request is worth a repeat; raise EtcdError otherwise."""
        if code == _UNAUTHENTICATED and self._token:
            self._token = ""  # it is too old: the next attempt asks for another one
        elif code not in (_CANCELLED, _DEADLINE, _EXHAUSTED, _UNAVAILABLE) and status < 500:
            hint = ", ".join(name for name in ACCESS_VARIABLES if name.endswith(("USER", "FILE")))
            raise EtcdError(f"{self.access} refuses: {problem} (access: {hint})")

    def _attempt(self, path: str, body: bytes, until: float) -> _Answer:
        """Ask the present endpoint, once."""
        seconds = max(0.05, min(ATTEMPT_S, until - time.monotonic()))
        if self._connection is None:
            host, port = self.access.endpoints[self._first]
            if self._tls is None:
                self._connection = HTTPConnection(host, port, timeout=seconds)
            else:
                self._connection = HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        headers = {"Content-Type": "application/json"}
        if self.access.user:
            self._token = self._token or self._authenticate()
            headers["Authorization"] = self._token
        return self._post(path, body, headers)

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> _Answer:
        assert self._connection is not None  # noqa: S101 - `_attempt` has made it
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        return _Answer(response.status, response.read())

    def _authenticate(self) -> str:
        """Return a token for the user; raises EtcdError if the password is refused."""
        try:
            password = Path(self.access.password_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise EtcdError(f"cannot read {self.access.password_file}: {error.strerror}") from error
        who = msgspec.json.encode({"name": self.access.user, "password": password})
        answer = self._post("/v3/auth/authenticate", who, {"Content-Type": "application/json"})
        if answer.status >= 400:
            refusal = _refusal(answer)
            if refusal.code == _INVALID:
                raise EtcdError(f"{self.access} refuses the password of {self.access.user}")
            self._judge(refusal.code, answer.status, refusal.error)
            raise ConnectionError(refusal.error)
        return msgspec.json.decode(answer.body, type=_Token).token


def _tls(access: EtcdAccess) -> ssl.SSLContext | None:
    """Return the context of TLS; None: plain connections."""
    if not access.ca:
        return None
    try:
        context = ssl.create_default_context(cafile=access.ca)
        context.sslsocket_class = TlsConnection
        if access.cert:
            context.load_cert_chain(access.cert, access.key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(filter(None, (access.ca, access.cert, access.key)))
        raise UsageError(f"the certificates for etcd cannot be used ({files}): {error}") from error
    return context


def _refusal(answer: _Answer) -> _Refusal:
    try:
        return msgspec.json.decode(answer.body, type=_Refusal, strict=False)
    except UNREADABLE:
        text = answer.body[:300].decode(errors="replace").strip()
        return _Refusal(error=f"HTTP {answer.status} {text}")
