"""The way of a node to its server: both prove that they know the secret, then the node is taken in.

Anyone may listen at the server's port. So a node says nothing of itself, and believes nothing,
before the program there has proved that it knows the secret (`rendezvous.auth`). Whatever another
program answers, the node goes on waiting for the right one. `JoinPlan` is what the node's command
line says.

The first node of a machine has the machine's name, a second one at the same server `name-2`. The
next process that holds a name is the successor of the one before, and the node keeps its name.

A process holds a name until it ends, however it ends: a locked file in a folder that nobody but
this user can write to. (Names of the kernel's own, as of abstract sockets, are for all users of the
machine: whoever takes one first keeps it from its owner.) Where no such folder can be had, the user
is told so, and everything goes on as if no other process had the name.

Server and node both have the secret, and it is in no argument. It is one of three, in this order:
a key derived from the text of --token-file; the run's own token, if node and server share a state
directory; a key derived from --run-id, which is only as secret as the id. Each proves to the other
that it has it (`rendezvous.auth`), and the node gets a token of its own, a new one for each run.
So no process of a run that is over can talk to the next run. Times are seconds.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from elastic_driver.console import say_note
from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.runtime.run_dir import default_state_dir, read_endpoint
from elastic_driver.settings import Settings
from elastic_driver.words import joining as messages
from elastic_driver.words.joining import Hello, HelloAnswer, Joined, NodeProof, NodeReport
from launcher.launch.host_source import Join
from launcher.network import addresses_of, bracketed, machine_id, own_name
from launcher.options.table import LaunchOptions
from rendezvous import errors
from rendezvous.auth import Handshake, Speaker, make_nonce, read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import TokenError
from rendezvous.own_files import own_folder
from rendezvous.tls import FIRST_SEEN, NotTlsError, WrongServerError, known_by_ca
from rendezvous.wire import UNREADABLE

# ---- the secret --------------------------------------------------------------------------

LEAST_CHARS = 16
_SALT = b"elastic-driver: nodes that join"
_COST = 2**14  # scrypt's N; with r=8 about 16 MiB and 50 ms for each guess (RFC 7914)


@functools.lru_cache(maxsize=16)
def derive(text: str) -> str:
    """Return the key of a --token-file's text or a run id; everyone who knows it can make the key.

    It takes time, so that guesses which are tested against a proof take time, too.
    """
    return hashlib.scrypt(text.encode(), salt=_SALT, n=_COST, r=8, p=1, dklen=32).hex()


def read_secret(path: str) -> str:
    """Return the text of a --token-file; raises TokenError or UsageError if it is no secret."""
    if not Path(path).exists():
        raise UsageError(
            f"--token-file {path} does not exist; copy the server's, or make one for server and "
            f"nodes with: (umask 077; openssl rand -hex 32 > {path})"
        )
    text = read_token_file(path)
    if len(text.split()) != 1 or not text.isprintable():
        raise UsageError(f"--token-file {path} holds more than one word; one is the secret")
    if len(text) < LEAST_CHARS:
        raise UsageError(
            f"--token-file {path} holds {len(text)} characters, which can be guessed; make one "
            f"with: (umask 077; openssl rand -hex 32 > {path})"
        )
    return text


def of_server(token_file: str | None, run_id: str | None) -> tuple[str, ...]:
    """Return the secrets that the server takes from nodes beside its own token."""
    if token_file is not None:
        return (derive(read_secret(token_file)),)
    return () if run_id is None else (derive(run_id),)


def of_node(
    token_file: str | None, run_id: str | None, state_dir: Path, port: int
) -> tuple[str, ...]:
    """Return the secrets that a node may try, the best first; none: it has no secret (yet).

    Without a token file these are the tokens of the runs of that name, or at that port, in a shared
    state directory, and the key of the run id.
    """
    if token_file is not None:
        return (derive(read_secret(token_file)),)
    tokens = []
    for folder in sorted(state_dir.glob("*")) if run_id is None else [state_dir / run_id]:
        run = read_endpoint(folder)
        # A token may be unreadable: it is another user's, or the run is just ending.
        with contextlib.suppress(TokenError):
            if run is not None and (run_id is not None or urlsplit(run.url).port == port):
                tokens.append(read_token_file(folder / "token"))
    return (*tokens, *(() if run_id is None else (derive(run_id),)))


# ---- names that are taken on this machine -------------------------------------------------


FOLDER = ".names"  # in the default folder of all runs; no run has such a name
_MOST = 1000  # nodes of one machine at one server
_NETWORK = "/proc/self/ns/net"  # containers with networks of their own are machines of their own
_ATTEMPTS = 10  # the last holder removes its file, perhaps just after it was opened here


class _Names:
    """The names of this user's processes on this machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Make the folder; raises OSError if there can be none of this user's own."""
        self.folder = default_state_dir(environ) / FOLDER
        own_folder(self.folder)
        network = os.readlink(_NETWORK) if os.path.exists(_NETWORK) else ""
        self._machine = f"{machine_id()} {os.uname().nodename} {network}"

    def take(self, name: str, held: contextlib.ExitStack) -> bool:
        """Hold a name until `held` is closed; return whether no other process has it."""
        digest = hashlib.sha256(f"{self._machine} {name}".encode()).hexdigest()[:32]
        path = self.folder / digest
        for _attempt in range(_ATTEMPTS):
            with contextlib.ExitStack() as ours:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(path, flags, 0o600)
                ours.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False)):
                        ours.callback(_remove, path)  # before the lock is free
                        held.push(ours.pop_all())
                        return True
        raise OSError(errno.EBUSY, "its files come and go too fast")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def claim_port(port: int, environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[bool]:
    """Yield whether this process is the one of this user and machine that serves at this port.

    The claim comes before anything is opened: two processes that start together both find the port
    free. `say` shows a line where nothing can be claimed; then it is this process.
    """
    with contextlib.ExitStack() as held:
        ours = True
        try:
            ours = _Names(environ).take(f"serve {port}", held)
        except OSError as error:
            why = _why_not(environ, error)
            say(f"no names can be kept {why}; another process of yours may serve at port {port}")
        yield ours


@contextlib.contextmanager
def claim_name(
    places: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[str]:
    """Yield a name that no other live node of this user and machine has at any of these places.

    `places`: the server's address, and what else tells its job. `say` shows a line where nothing
    can be claimed; then it is the machine's name. Raises OSError for more than 1000 nodes.
    """
    base = own_name()
    with contextlib.ExitStack() as held:
        try:
            name = _first_free(base, places, environ, held)
        except OSError as error:
            say(
                f"no names can be kept {_why_not(environ, error)}; a second node of yours on this "
                "machine would take the place of this one"
            )
            name = base
        if name is None:
            raise OSError(f"{_MOST} nodes of this machine have joined {places[0]} already")
        yield name


def _first_free(
    base: str, places: Sequence[str], environ: Mapping[str, str], held: contextlib.ExitStack
) -> str | None:
    names = _Names(environ)
    for number in range(1, _MOST + 1):
        with contextlib.ExitStack() as tried:
            if all(names.take(f"join {place} {number}", tried) for place in places):
                held.push(tried.pop_all())
                return base if number == 1 else f"{base}-{number}"
    return None


def _why_not(environ: Mapping[str, str], error: OSError) -> str:
    folder = default_state_dir(environ) / FOLDER
    return f"in {folder}: {error.strerror or error}"


# ---- the way to the server ----------------------------------------------------------------


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
