"""The server's part in the proof of a node that wants to join (`rendezvous.proof`).

These are the only routes besides `/healthz` that need no token, and the only ones that a secret
opens. A wrong proof is answered late; each address that fails is reported once. The routes run on
the server's loop, `expire` on any thread. Times are seconds.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from elastic_driver.words import joining as join
from rendezvous.limits import Hits, Limits
from rendezvous.proof import Handshake, OpenHello, OpenHellos, Speaker, make_nonce
from rendezvous.web import PEER, Problem, json_answer, read_json

PAUSE_S = 1.0  # before the answer to a wrong proof
MOST_NAMED = 100  # addresses that are reported
T = TypeVar("T")
log = logging.getLogger(__name__)
_decode_hello = msgspec.json.Decoder(join.Hello).decode
_decode_proof = msgspec.json.Decoder(join.NodeProof).decode


class NodeProofs:
    """Answers hellos and checks proofs.

    Args:
        secrets: a node has to know one of these.
        fingerprint: of the server's certificate; "": it has none.
        limits: the bounds of the server.
        hits: counts proofs that were wrong, too late or did not come.
    """

    def __init__(
        self, secrets: tuple[str, ...], fingerprint: str, limits: Limits, hits: Hits
    ) -> None:
        self._secrets, self._fingerprint, self._hits = secrets, fingerprint, hits
        self._hellos = OpenHellos(limits)
        self._lock = threading.Lock()
        self._named: set[str] = set()  # addresses

    async def hello(self, request: web.Request) -> web.Response:
        """Prove to a node that the server knows the secrets; the node's proof has to follow."""
        nonce = (await _read(request, _decode_hello)).nonce
        handshake = Handshake(nonce, make_nonce(), self._fingerprint)
        with self._lock:
            gone = self._hellos.add(handshake, request[PEER], time.monotonic())
        self._tell(gone)
        proofs = tuple(handshake.prove(secret, Speaker.SERVER) for secret in self._secrets)
        return json_answer(join.HelloAnswer(handshake.server_nonce, proofs))

    async def check(self, request: web.Request) -> join.NodeReport:
        """Return the report of a node that has proved a secret; raises Problem if it has not."""
        claim = await _read(request, _decode_proof)
        with self._lock:
            hello = self._hellos.take(claim.nonce, time.monotonic())
        if hello is not None:
            if hello.handshake.proved(self._secrets, Speaker.NODE, (claim.proof,)) is not None:
                return claim.report
            self._tell([hello])
            await asyncio.sleep(PAUSE_S)
        raise Problem(403, "no_proof", "the proof is wrong, late or repeated", "say hello again")

    def expire(self) -> None:
        """Report the nodes that have said hello and have not proved anything since."""
        with self._lock:
            gone = self._hellos.expire(time.monotonic())
        self._tell(gone)

    def _tell(self, failed: list[OpenHello]) -> None:
        for _ in failed:
            self._hits.count("no_proof")
        for peer in {hello.peer for hello in failed} - self._named:
            if len(self._named) < MOST_NAMED:
                self._named.add(peer)
                log.warning(
                    "a program at %s asked to join and did not prove that it knows this job's "
                    "secret; if it is a node of yours, its --run-id (--rdzv-id) or --token-file "
                    "differs from the server's",
                    peer,
                )


async def _read(request: web.Request, decode: Callable[[bytes], T]) -> T:
    if request.content_length is None or request.content_length > join.MAX_STRANGERS_BYTES:
        limit = f"the body may have {join.MAX_STRANGERS_BYTES} bytes, and its length is told first"
        raise Problem(413, "too_large", limit)
    return await read_json(request, decode)
