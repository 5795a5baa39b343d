"""The receipt of a grant, by which a job proves what it was granted to a Brain that lost its state.

The Brain gives it with each grant, and the driver sends it back with its reports as it came. It
names the job, the run, the grant and the slots, and ends with an HMAC-SHA256 that only the Brain
can make. Its key comes from the Brain's own token, which stays when the state is lost. The book
tells one state from the next one: a Brain that has its state needs no receipt of its own book.
Pure.
"""

import base64
import hmac
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from elastic_driver.brain.documents import Grant, SlotsByHost

_LABEL = b"receipts of grants"


class Proved(Struct, frozen=True, kw_only=True):
    """The content of a receipt: the slots of a grant, and others that the job may have had then.

    `known`: whether it is of the present book, so that the Brain knows it anyway.
    """

    number: int
    hosts: SlotsByHost
    claims: SlotsByHost
    known: bool = False


class _Receipt(Struct, frozen=True, array_like=True):
    book: str
    job: str
    began: float
    number: int
    hosts: SlotsByHost
    claims: SlotsByHost


class Receipts:
    """Makes the receipts of one Brain, and reads them. `book`: names its present state."""

    def __init__(self, token: str, book: str) -> None:
        self._key, self._book = hmac.digest(token.encode(), _LABEL, "sha256"), book

    def of(self, job: str, grant: Grant, claims: Mapping[str, int]) -> str:
        """Return the receipt of a grant."""
        said = _Receipt(self._book, job, grant.began, grant.number, dict(grant.hosts), dict(claims))
        body = base64.urlsafe_b64encode(msgspec.msgpack.encode(said)).decode()
        return f"{body}.{self._proof(body)}"

    def read(self, receipt: str, job: str, began: float) -> Proved | None:
        """Return what a receipt proves of this run of a job; None: nothing."""
        body, _, proof = receipt.rpartition(".")
        if not receipt.isascii() or not hmac.compare_digest(proof, self._proof(body)):
            return None
        try:
            said = msgspec.msgpack.decode(base64.urlsafe_b64decode(body), type=_Receipt)
        except (ValueError, msgspec.MsgspecError):
            return None
        if (said.job, said.began) != (job, began):
            return None
        return Proved(
            number=said.number,
            hosts=said.hosts,
            claims=said.claims,
            known=said.book == self._book,
        )

    def _proof(self, body: str) -> str:
        return hmac.digest(self._key, body.encode(), "sha256").hex()
