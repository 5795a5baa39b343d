"""The way of a node to its server: both prove that they know the secret, then the node is taken in.

Anyone may listen at the server's port. So a node says nothing of itself, and believes nothing,
before the program there has proved that it knows the secret (`rendezvous.auth`). Whatever another
program answers, the node goes on waiting for the right one. `JoinPlan` is what the node's command
line says. Times are seconds.
"""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_driver.console import say_note
from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.settings import Settings
from elastic_driver.words import joining as messages
from elastic_driver.words.joining import Hello, HelloAnswer, Joined, NodeProof, NodeReport
from launcher.join.node_name import of_node
from launcher.launch.hosts import Join
from launcher.network import addresses_of, bracketed
from launcher.options.table import LaunchOptions
from rendezvous import errors
from rendezvous.auth import Handshake, Speaker, make_nonce
from rendezvous.client import RendezvousClient
from rendezvous.tls import FIRST_SEEN, NotTlsError, WrongServerError, known_by_ca
from rendezvous.wire import UNREADABLE


@dataclass(frozen=True)
class JoinPlan:
    """The command line of a node that joins."""

    server: Join
    slots: int | None  # None: the server's number
    options: LaunchOptions
    settings: Settings
    state_dir: Path
    command: tuple[str, ...] = ()  # the command typed here; the server's command runs
    insecure: bool = False  # the server may speak plain HTTP
    tls_ca: str | None = None  # file with the CA of the server's certificate; None: no CA is asked

    @property
    def place(self) -> str:
        """The server's address as it is written in a URL."""
        return f"{bracketed(self.server.host)}:{self.server.port}"

    def say(self, sentence: str) -> None:
        """Show a sentence on stderr, unless --quiet was given."""
        if not self.options.quiet:
            say_note(sentence, as_json=self.options.log_format == "json")


ATTEMPT_S = 3.0  # the time for one address of the server to answer
MOST_ANSWERED = 128 * 1024  # bytes; a site's CA may be in an answer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
_PLAIN = "speaks no TLS; if it is the server and was given --insecure, give it to this node, too"
_decode_answer = msgspec.json.Decoder(HelloAnswer).decode
_decode_joined = msgspec.json.Decoder(Joined).decode


@dataclass(frozen=True)
class FoundServer:
    """The job's server and its answer to this node; `url` has a numeric address."""

    url: str
    joined: Joined
    seen: str = ""  # the fingerprint of its certificate, to which the proofs are bound

    @property
    def fingerprint(self) -> str:
        """The word by which clients here know the server's certificate (`rendezvous.tls`)."""
        return self.joined.known_by if self.seen else ""

    def client(self, url_file: Path | None = None) -> RendezvousClient:
        """Return a client with the token of this node; `url_file`: see `RendezvousClient`."""
        token = self.joined.token
        patience = self.joined.heartbeat_timeout
        known = self.fingerprint
        return RendezvousClient(self.url, token, patience, url_file=url_file, fingerprint=known)


class _WaitError(Exception):
    """Says why an attempt has failed; the next one may succeed.

    `final` is the error for the user if none does; None: nothing listens there.
    """

    def __init__(self, problem: str, final: ElasticError | None = None) -> None:
        super().__init__(problem)
        self.final = final


def find_server(plan: JoinPlan, offer: NodeReport, patience: float, option: str) -> FoundServer:
    """Wait until the server takes this node in.

    The server's name is looked up again for each attempt, because the server may come back at
    another address. Agents get a numeric address, so that no name is looked up later.

    Raises an ElasticError if no server has taken this node in within `patience` seconds (`option`
    sets them), or the server refuses it for good; CertificateError for a wrong --tls-ca.
    """
    until = time.monotonic() + patience
    pause = FIRST_PAUSE_S
    told = set[str]()
    ca, host = plan.tls_ca, plan.server.host
    known_by = FIRST_SEEN if ca is None else known_by_ca(Path(ca), host)

    def tell(sentence: str) -> None:
        if sentence not in told:
            told.add(sentence)
            plan.say(sentence)

    while True:
        try:
            return _attempt(plan, known_by, offer)
        except _WaitError as found:
            if found.final is not None:
                tell(str(found.final))
            if time.monotonic() + pause > until:
                raise found.final or ClusterError(
                    f"no server at {plan.place} within {patience:g} s ({option}): {found}; is it "
                    "started, and can this host reach that port?"
                ) from None
        why = plan.server.because and (
            f": {plan.server.because} in the environment make this node join it; unset them, or "
            "say --standalone, to train here alone"
        )
        tell(f"waiting for the server at {plan.place}, {patience:g} s at most{why}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _attempt(plan: JoinPlan, known_by: str, offer: NodeReport) -> FoundServer:
    """Try every address of the server; raises _WaitError if none takes this node in."""
    host, port = plan.server.host, plan.server.port
    problem = _WaitError(f"the name {host} has no address")
    for address in addresses_of(host):
        try:
            socket.create_connection((address, port), ATTEMPT_S).close()
        except TimeoutError:
            problem = _WaitError(f"{address} does not answer")
            continue
        except OSError as error:
            problem = _WaitError(error.strerror or str(error))
            continue
        found = []
        plain = plan.insecure and plan.tls_ca is None
        for scheme in ("http", "https") if plain else ("https",):
            try:
                url = f"{scheme}://{bracketed(address)}:{port}"
                return _join(plan, url, known_by if scheme == "https" else "", offer)
            except _WaitError as error:
                found.append(error)
            except (errors.RendezvousError, *UNREADABLE) as error:
                cause = getattr(error, "cause", error)
                wrong = isinstance(cause, WrongServerError) and not plain
                words = _PLAIN if isinstance(cause, NotTlsError) else f"is not trusted: {cause}"
                found.append(_no_server(plan, words) if wrong else _WaitError(str(cause)))
        problem = next((each for each in found if each.final is not None), found[0])
    raise problem


def _join(plan: JoinPlan, url: str, known_by: str, offer: NodeReport) -> FoundServer:
    """Say hello, check the server's proof, and prove to it that this node knows the secret.

    `known_by`: how the server's certificate is known (`rendezvous.tls`).
    """
    options = plan.options
    known = of_node(options.token_file, options.run_id, plan.state_dir, plan.server.port)
    if not known:
        raise UsageError(
            f"the server at {plan.place} is up, but this node has no secret to join it: give the "
            "same --run-id (--rdzv-id) on every node, or the same --token-file"
        )
    with RendezvousClient(
        url, "", ATTEMPT_S, repeats=False, fingerprint=known_by, max_answer=MOST_ANSWERED
    ) as client:
        handshake, secret = _verify(plan, client, known)
        proof = NodeProof(handshake.server_nonce, handshake.prove(secret, Speaker.NODE), offer)
        try:
            body = client.post_json(messages.PROOF_PATH, msgspec.json.encode(proof))
        except errors.RequestError as error:
            if error.status == 409:
                raise UsageError(str(error)) from None
            raise
        return FoundServer(url, _decode_joined(body), client.peer_fingerprint)


def _verify(
    plan: JoinPlan, client: RendezvousClient, known: tuple[str, ...]
) -> tuple[Handshake, str]:
    """Return the exchange and the secret that the server has proved; raises _WaitError."""
    nonce = make_nonce()
    try:
        body = client.post_json(messages.HELLO_PATH, msgspec.json.encode(Hello(nonce)))
        answer = _decode_answer(body)
    except errors.UnauthorizedError:
        raise _no_server(
            plan, "asks for the secret itself; is its elastic-driver older than this node's?"
        ) from None
    except errors.RequestError as error:
        if error.status not in (404, 405):
            raise
        raise _no_server(
            plan,
            f"takes in no nodes ({error.code}); start it with --serve, or with --nnodes of more "
            "than 1 and --rdzv-endpoint",
        ) from None
    handshake = Handshake(nonce, answer.nonce, client.peer_fingerprint)
    secret = handshake.proved(known, Speaker.SERVER, answer.proofs)
    if secret is None:
        problem = (
            f"the server at {plan.place} does not know this node's secret; another program or "
            "another user's job may listen there, or --run-id (--rdzv-id) or --token-file differ "
            "from the server's"
        )
        raise _WaitError(problem, UsageError(problem))
    return handshake, secret


def _no_server(plan: JoinPlan, sentence: str) -> _WaitError:
    problem = f"the program at {plan.place} {sentence}"
    return _WaitError(problem, ClusterError(problem))
