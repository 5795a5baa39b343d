"""How an agent shows its driver that it, and no other program, listens at a port.

The port of an agent that has died may be another program's by now, on a machine that several users
share, or another agent's of the same job. So whoever probes sends a question, one line with a
random number, and the agent answers with an HMAC-SHA256 of it by its own token, in which its name
is, too. An answer says nothing else, and is worth nothing for another question. Pure.
"""

import hashlib
import hmac
import re
from typing import NamedTuple

import msgspec

from rendezvous.proof import make_nonce

_PURPOSE = "elastic-driver: an agent is present, version 1"
_QUESTION = re.compile(rb"\?[0-9a-f]{64}\Z")


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
        text = msgspec.json.encode((_PURPOSE, self.host, self.incarnation, question.decode()))
        return hmac.new(self.token.encode(), text, hashlib.sha256).hexdigest().encode() + b"\n"
