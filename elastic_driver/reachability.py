"""Shows whether a process, or only its machine, can be reached, and that it is the right process.

The driver probes agents by short connections, and an agent that gets no answer probes the driver
(`probe`). The result comes from several attempts, because the kernel sends a lost SYN again only
after a second.

The port of a process that has died may be another program's by now, on a machine that several users
share, or another process's of the same job. So whoever probes sends a question, one line with a
random number, and the process answers with an HMAC-SHA256 of it by its own token, in which its name
is, too (`Presence`, `DriverPresence`). An answer says nothing else, and is worth nothing for
another question.

An agent finds the next driver by itself at the address of the last one. A driver elsewhere connects
to the port where the agent answers probes, and lets it show that it is that agent. Then it sends
one line: run, term and URL, with an HMAC-SHA256 by the agent's token (`Announcement`). The agent
follows terms higher than the one that it knows, so a repeated message does nothing.

Connections run on an asyncio loop; times are seconds.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import socket
from typing import Annotated, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct

from rendezvous.auth import make_nonce
from rendezvous.wire import UNREADABLE

_PURPOSE = "elastic-driver: an agent is present, version 1"
_ASKS = "elastic-driver: a Brain asks for a driver, version 1"
_LIVES = "elastic-driver: a driver lives, version 1"
_QUESTION = re.compile(rb"\?[0-9a-f]{64}\Z")
_QUESTION_OF_BRAIN = re.compile(rb"(\?[0-9a-f]{64}) ([0-9a-f]{64})\Z")


class Asked(NamedTuple):
    """A question, and the answer that only the right process can give; a line each."""

    question: bytes
    answer: bytes


class Presence(NamedTuple):
    """An agent, as it and its driver know it: `token` is that of the agents of its host."""

    token: str
    host: str
    incarnation: int

    def ask(self) -> Asked:
        """Return a new question to this agent."""
        question = b"?" + make_nonce().encode()
        return Asked(question + b"\n", self._prove(question))

    def answer(self, line: bytes) -> bytes | None:
        """Return the answer to a line without its end; None: it is no question."""
        return self._prove(line) if _QUESTION.match(line) else None

    def _prove(self, question: bytes) -> bytes:
        return (
            _proof(self.token, (_PURPOSE, self.host, self.incarnation, question.decode())) + b"\n"
        )


class DriverPresence(NamedTuple):
    """The driver of a Brain's job, as it and the Brain know it.

    `token`: of the job. `began`: of the run. `place`: HOST:PORT where it listens; so nobody passes
    a question on to another driver, or to another port. The question proves that the Brain asks.
    """

    token: str
    began: float
    place: str

    def ask(self) -> Asked:
        """Return a new question to this driver."""
        number = b"?" + make_nonce().encode()
        return Asked(number + b" " + self._prove(_ASKS, number) + b"\n", self._answer(number))

    def answer(self, line: bytes) -> bytes | None:
        """Return the answer to a line without its end; None: it is no question of the Brain."""
        found = _QUESTION_OF_BRAIN.match(line)
        if not found or not hmac.compare_digest(found[2], self._prove(_ASKS, found[1])):
            return None
        return self._answer(found[1])

    def _answer(self, number: bytes) -> bytes:
        return self._prove(_LIVES, number) + b"\n"

    def _prove(self, purpose: str, number: bytes) -> bytes:
        return _proof(self.token, (purpose, self.began, self.place, number.decode()))


def _proof(token: str, said: tuple[str | int | float, ...]) -> bytes:
    return hmac.new(token.encode(), msgspec.json.encode(said), hashlib.sha256).hexdigest().encode()


ATTEMPTS = 4
# "refused": the machine says that no process listens there, or another program answers; "silent":
# there was no clear answer.
Result: TypeAlias = Literal["answered", "refused", "silent"]


async def probe(address: str, port: int, patience: float, asked: Asked | None = None) -> Result:
    """Return the first clear answer of several attempts within `patience` seconds.

    With `asked`, the process has to answer that question: a stopped one accepts connections too, as
    its kernel does that, and so does whoever has the port by now. The attempts begin one after the
    other and go on side by side. If this process is stopped meanwhile, one attempt loses its time
    and the others still have theirs.
    """
    attempts = set[asyncio.Task[Result | None]]()
    try:
        for _ in range(ATTEMPTS):
            attempts.add(asyncio.create_task(_attempt(address, port, asked)))
            pause = asyncio.create_task(asyncio.sleep(patience / ATTEMPTS, None))
            waiting: set[asyncio.Task[Result | None]] = {pause, *attempts}
            while pause in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for result in (task.result() for task in done):
                    if result is not None:
                        pause.cancel()
                        return result
            attempts = waiting
        return "silent"
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _attempt(address: str, port: int, asked: Asked | None) -> Result | None:
    """Connect, ask and read the answer; return None if that proves nothing."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (address, port))
        except ConnectionRefusedError:
            return "refused"
        if asked is None:
            return "answered"
        await loop.sock_sendall(connection, asked.question)
        found = b""
        while asked.answer.startswith(found) and found != asked.answer:
            if not (more := await loop.sock_recv(connection, len(asked.answer))):
                return None  # cut off, perhaps before the answer was there
            found += more
        return "answered" if found == asked.answer else "refused"
    return None


def reachable_url(url: str, address: str, port: int) -> str:
    """Return the URL as another host sees it: loopback becomes the address that leads there.

    The server's own URL names loopback where it listens at all addresses.
    """
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or "") or is_loopback(address):
        return url
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:  # nothing is sent by `connect`
        unsent.connect((address, port))
        own = unsent.getsockname()[0]
    host = f"[{own}]" if ":" in own else own
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def is_loopback(host: str) -> bool:
    """Return whether this is a numeric address of loopback; a name is not."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return False


READ = b"+\n"  # the line by which an agent says that it has read the message
PATIENCE_S = 2.0  # for an agent to answer
MAX_LINE = 4096  # bytes, the newline included


class Announcement(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of JSON; `mac` is in hexadecimal digits."""

    run_id: str
    term: Annotated[int, Meta(ge=1, le=2**20)]
    url: str  # of the new driver's rendezvous
    mac: str


def announcement(run_id: str, term: int, url: str, token: str) -> bytes:
    """Return the line for the agents of a run."""
    message = Announcement(run_id, term, url, _announcement_mac(run_id, term, url, token))
    return msgspec.json.encode(message) + b"\n"


def verified(line: bytes, run_id: str, token: str) -> Announcement | None:
    """Return the message in a line; None if it is not from a driver of this run."""
    try:
        message = msgspec.json.decode(line, type=Announcement)
    except UNREADABLE:
        return None
    wanted = _announcement_mac(run_id, message.term, message.url, token)
    genuine = hmac.compare_digest(message.mac.encode(), wanted.encode())
    return message if genuine and message.run_id == run_id else None


def _announcement_mac(run_id: str, term: int, url: str, token: str) -> str:
    text = msgspec.json.encode((run_id, term, url))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


async def announce(
    address: str, port: int, agent: Presence, *, run_id: str, term: int, url: str
) -> bool:
    """Tell the agent that answers probes at this address of a new driver.

    Return whether that agent has read it; False after `PATIENCE_S`. That the agent follows
    shows only in its requests (`AgentReturned`).
    """
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        line = announcement(run_id, term, url, agent.token)
        return await asyncio.wait_for(
            _send_announcement(address, port, agent.ask(), line), PATIENCE_S
        )
    return False


async def _send_announcement(address: str, port: int, asked: Asked, line: bytes) -> bool:
    reader, writer = await asyncio.open_connection(address, port, limit=MAX_LINE)
    try:
        writer.write(asked.question)
        if await reader.readexactly(len(asked.answer)) != asked.answer:
            return False
        writer.write(line)
        return await reader.readexactly(len(READ)) == READ
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()
