"""Rogue clients at a job's door: `python -m tests.chaos.rogues RUN_DIR SECONDS SEED [NAME …]`.

Half of them have no token. The others have that of a worker which the job does not know, as a
worker gone mad would. Each runs in a thread of its own until the time is over; a refusal or a
closed connection is an answer like any other. Prints a line of JSON: the answers by status, for
each rogue. Ends with 1 if the server answered 500, which is a bug of its own.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_driver.token_roles import agent_token, worker_token
from rendezvous.auth import read_token_file

WORKER = "rogue.0.1"
IDLE = 200  # sockets that say nothing
PATIENCE_S = 1.0  # for an answer
TRIES = 10
BREATH_S = 0.005  # between two requests of one rogue: they are many
BATCH, EVENTS = "/v1/kv:batch", "/v1/events"


class Door:
    """The address of a job's rendezvous, and a worker's token."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        url = urlsplit(json.loads((run_dir / "endpoint.json").read_text())["url"])
        self._address = (str(url.hostname), int(url.port or 0))
        self._context = _trusting() if url.scheme == "https" else None
        host = WORKER.rsplit(".", 2)[0]
        self.token = worker_token(agent_token(read_token_file(run_dir / "token"), host), WORKER)
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.answers: Counter[str] = Counter()

    def going(self) -> bool:
        """Whether there is time left; waits for a moment."""
        return not self.over.wait(BREATH_S)

    def connect(self) -> socket.socket:
        """A connection; raises OSError."""
        plain = socket.create_connection(self._address, PATIENCE_S)
        plain.settimeout(PATIENCE_S)
        if self._context is None:
            return plain
        return self._context.wrap_socket(plain)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Count a refusal by the network as an answer."""
        try:
            yield
        except OSError as error:
            self.answers[type(error).__name__] += 1

    def say(self, message: bytes) -> str:
        """Send something on a connection of its own; count and return the status of the answer."""
        with self.trying(), self.connect() as connection:
            connection.sendall(message)
            return self.count(connection.recv(65536))
        return "none"

    def count(self, answer: bytes) -> str:
        """Count an answer by its status, and return the status."""
        words = answer.split(None, 2)
        status = words[1].decode() if len(words) > 1 else "closed"
        self.answers[status] += 1
        return status

    def post(self, path: str, body: bytes) -> str:
        """A POST with the worker's token; return the status of the answer."""
        return self.say(head(path, body, self.token) + body)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def head(path: str, body: bytes, token: str) -> bytes:
    """The head of a POST."""
    lines = f"Host: a\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n\r\n".encode()


# ---- without a token ---------------------------------------------------------------------


def wrong_tokens(door: Door) -> None:
    """Guess tokens, many on one connection."""
    while door.going():
        with door.trying(), door.connect() as connection:
            for _ in range(50):
                guess = f"worker:{WORKER}:{door.random.getrandbits(256):064x}"
                connection.sendall(head(BATCH, b"{}", guess) + b"{}")
                door.count(connection.recv(65536))


def malformed(door: Door) -> None:
    """Send what is no HTTP, or nearly."""
    shapes: tuple[Callable[[], bytes], ...] = (
        lambda: door.random.randbytes(door.random.randrange(1, 300)),
        lambda: b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer \xff\r\nA\0b: c\r\n\r\n",
        lambda: b"GET / HTTP/9.9\r\n\r\n",
        lambda: b"POST /v1/kv:batch HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        lambda: b"POST /v1/events HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
        lambda: b"GET " + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    )
    while door.going():
        door.say(door.random.choice(shapes)())


def idle(door: Door) -> None:
    """Open many connections and say nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(IDLE):
            if door.over.is_set():
                return
            with door.trying():
                held.enter_context(door.connect())
        door.over.wait()


def half_sent(door: Door) -> None:
    """Send halves of heads and bodies, and wait."""
    halves = (
        b"POST /v1/kv:batch HT",
        b"GET /v1/status HTTP/1.1\r\nAuthoriz",
        b"POST /v1/events HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{",
        head(BATCH, bytes(1000), "guess") + b"{",
    )
    with contextlib.ExitStack() as held:
        for number in range(IDLE // 2):
            if door.over.is_set():
                return
            with door.trying():
                connection = held.enter_context(door.connect())
                connection.sendall(halves[number % len(halves)])
        door.over.wait()


def reads_nothing(door: Door) -> None:
    """Ask on and on, and take no answer."""
    ask = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 200
    while door.going():
        with door.trying(), door.connect() as connection:
            while door.going():
                connection.sendall(ask)


def page(door: Door) -> None:
    """Ask for the page's files, and guess logins and sessions."""
    while door.going():
        guess = f"{door.random.getrandbits(256):064x}"
        cookie = f"elastic={guess}; elastic-session={guess}"
        login = f'{{"token":"{guess}"}}'
        for message in (
            "GET /assets/app.js HTTP/1.1\r\nHost: a\r\n\r\n" * 20,
            f"GET /v1/live HTTP/1.1\r\nHost: a\r\nCookie: {cookie}\r\nX-Elastic: {guess}\r\n\r\n",
            "POST /login HTTP/1.1\r\nHost: a\r\nX-Elastic: page\r\n"
            f"Content-Length: {len(login)}\r\n\r\n{login}",
        ):
            door.say(message.encode())


# ---- a worker gone mad -------------------------------------------------------------------


def forbidden(door: Door) -> None:
    """Write keys and call routes that are others'."""
    bodies = [
        {"type": kind, "key": key, **more}
        for key in ("job/world", "job/notice", "agents/localhost.1/orders/1", "checks/spec")
        for kind, more in (("set", {"value": "AAAA"}), ("delete", {}), ("add", {"amount": 1}))
    ]
    bodies += [{"type": "delete_prefix", "prefix": p, "seal": True} for p in ("job/", "r", "w")]
    while door.going():
        door.post(BATCH, _batch(door, door.random.choice(bodies)))
        door.post(door.random.choice(("/v1/scale", "/v1/stop", "/v1/stacks")), b"{}")


def big_batches(door: Door) -> None:
    """Ask for far more than is sent."""
    key = "rogue/large"
    door.post(BATCH, _batch(door, {"type": "set", "key": key, "value": "A" * 1_000_000}))
    costly: tuple[list[dict[str, Any]], ...] = (
        [{"type": "get", "keys": [key]}] * 500,
        [{"type": "count", "prefix": ""}] * 2000,
        [{"type": "get", "keys": ["rogue/none"], "wait": 60}] * 1000,
        [{"type": "compare_set", "key": key, "expected": "AAAA", "desired": ""}] * 500,
        [{"type": "append", "key": f"rogue/{n}", "value": "A" * 400} for n in range(500)],
    )
    while door.going():
        door.post(BATCH, _batch(door, *door.random.choice(costly)))
    gone = {"type": "delete_prefix", "prefix": "rogue/"}  # keys that stay would count as growth
    for _ in range(TRIES):
        if door.post(BATCH, _batch(door, gone)) == "200":
            return


def nonsense(door: Door) -> None:
    """Send documents that are none: to the mailbox, and as a worker's own progress."""
    deep = b"[" * 100_000
    large = b"9" * 40
    bodies = (
        b"",
        deep,
        b'{"type":"worker_ready","more":' + deep,
        b'{"type":"worker_stepped","worker":"rogue.0.1","round":%b,"step":1}' % large,
        b'{"type":"agent_ready","host":"a","incarnation":1,"pid":1,"address":"a","ports":[%b]}'
        % large,
        b'{"type":"worker_stepped","worker":"nobody.0.1","round":1,"step":1}',
        b'{"type":"worker_exited","worker":"localhost.0.1","exit_code":0,"log_tail":""}',
        b'"\xff\xfe"',
    )
    progress = {"type": "set", "key": f"workers/{WORKER}/progress", "value": "/////w=="}
    while door.going():
        door.post(EVENTS, door.random.choice(bodies))
        door.post(BATCH, _batch(door, progress))


def _batch(door: Door, *operations: dict[str, Any]) -> bytes:
    name = f"rogue-{door.random.getrandbits(64)}"
    return json.dumps({"operations": operations, "request_id": name}).encode()


ROGUES = (
    *(wrong_tokens, malformed, idle, half_sent, reads_nothing, page),
    *(forbidden, big_batches, nonsense),
)


def main() -> int:
    """Be a nuisance for so long."""
    run_dir, seconds, seed, *names = sys.argv[1:]
    chosen = [rogue for rogue in ROGUES if not names or rogue.__name__ in names]
    doors = [Door(Path(run_dir), int(seed) + n) for n in range(len(chosen))]
    threads = [
        threading.Thread(target=rogue, args=(door,), daemon=True)
        for rogue, door in zip(chosen, doors, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(float(seconds))  # the length of the attack
    for door in doors:
        door.over.set()
    for thread in threads:
        thread.join(10 * PATIENCE_S)
    answers = {rogue.__name__: door.answers for rogue, door in zip(chosen, doors, strict=True)}
    print(json.dumps(answers))
    return int(any("500" in counted for counted in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
