"""How an agent or a driver shows that it, and no other program, listens at a port.

The port of a process that has died may be another program's by now, on a machine that several users
share, or another process's of the same job. So whoever probes sends a question, one line with a
random number, and the process answers with an HMAC-SHA256 of it by its own token, in which its name
is, too. An answer says nothing else, and is worth nothing for another question. Pure.
"""

import hashlib
import hmac
import re
from typing import NamedTuple

import msgspec

from rendezvous.auth import make_nonce

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
