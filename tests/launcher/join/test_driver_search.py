"""A node on its way to the server: programs that listen there learn nothing and command nothing."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.features.joining.driver import JoinedNodes, NodeRules
from elastic_driver.runtime.api import job_access
from elastic_driver.settings import Settings
from elastic_driver.words.joining import HelloAnswer, NodeReport
from launcher.join.driver_search import FoundServer, JoinPlan, derive, find_server
from launcher.launch.host_source import Join
from launcher.options.table import LaunchOptions
from rendezvous.auth import Handshake, Speaker, make_nonce, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError
from rendezvous.server import RendezvousServer, ServerTls
from rendezvous.tls import ServerCertificate, make_certificate
from tests.support.job import eventually

SECRET, RUN = "a-secret-of-so-many-characters", "the-run"
OFFER = NodeReport("the-name", "the-machine", "the-session", "1.0", 2)


class Listener:
    """A program at a port that answers every request as it likes, and keeps all that it hears."""

    def __init__(
        self, answer: Callable[[bytes], bytes], context: ssl.SSLContext | None = None
    ) -> None:
        self.heard: list[bytes] = []  # on each connection
        self._answer, self._context = answer, context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.heard.append(b"")
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(5)
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        if self._context is not None:
            with self._context.wrap_socket(connection, server_side=True) as inside:
                self._answer_all(inside)
        else:
            self._answer_all(connection)

    def _answer_all(self, connection: socket.socket) -> None:
        request = b""
        while got := connection.recv(65536):
            self.heard[-1] += got
            request += got
            if is_whole(request):
                connection.sendall(self._answer(request))
                request = b""

    @property
    def requests(self) -> list[bytes]:
        """What was heard on each connection, without the attempts to speak TLS."""
        return [heard for heard in self.heard if heard[:1] not in (b"", b"\x16")]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


def is_whole(request: bytes) -> bool:
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return not head.startswith(b"POST") or (length is not None and len(body) >= int(length[1]))


@contextlib.contextmanager
def listening(
    answer: Callable[[bytes], bytes], context: ssl.SSLContext | None = None
) -> Iterator[Listener]:
    listener = Listener(answer, context)
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def serving(
    port: int = 0, secret: str = SECRET, certificate: ServerCertificate | None = None
) -> Iterator[RendezvousServer]:
    nodes = JoinedNodes(NodeRules(RUN, "1.0", 30.0, 1), (derive(secret),))
    with RendezvousServer(
        port=port,
        token="the token",
        access=job_access(),
        routes=nodes.add_to,
        tls=ServerTls(certificate=certificate),
    ) as server:
        nodes.open(server, "the token")
        yield server


def answered(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def with_proofs(_request: bytes) -> bytes:
    """What a server answers that has no secret and hopes for luck."""
    answer = HelloAnswer(make_nonce(), (make_nonce(), make_nonce()))
    return answered("200 OK", msgspec.json.encode(answer))


def plan(folder: Path, port: int, secret: str = SECRET) -> JoinPlan:
    options = LaunchOptions(token_file=str(write_token_file(folder / "secret", secret)))
    where = Join("127.0.0.1", port)
    return JoinPlan(where, 2, options, Settings(), folder / "state", insecure=True)


def find(plan: JoinPlan, patience: float) -> FoundServer:
    return find_server(plan, OFFER, patience, "--start-timeout")


def test_a_node_and_its_server_find_each_other(tmp_path: Path) -> None:
    with serving() as server:
        found = find(plan(tmp_path, server.port), 0.0)
        assert (found.url, found.joined.name, found.joined.run_id) == (server.url, "the-name", RUN)
        with found.client() as client:
            assert client.get("job/spec") is None
            with pytest.raises(RequestError, match="a token of role node may not write 'job/spec'"):
                client.set("job/spec", b"")


def test_a_hostile_program_learns_nothing_and_the_right_server_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with listening(with_proofs) as hostile:
            finding = pool.submit(find, plan(tmp_path, hostile.port), 60.0)
            eventually(lambda: len(hostile.requests) > 1, within=30, what="the node asks twice")
        with serving(hostile.port):
            assert finding.result(60).joined.name == "the-name"
    for request in hostile.requests:
        assert request.startswith(b"POST /v1/nodes/hello "), "nothing else was asked"
        assert request.count(b"POST") == 1
        assert len(request) < 400
    for word in (SECRET, derive(SECRET), OFFER.name, OFFER.machine, OFFER.session, "Bearer", RUN):
        assert word.encode() not in b"".join(hostile.heard), word
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "waiting for" not in line] == [
        f"elasticrun: the server at 127.0.0.1:{hostile.port} does not know this node's secret; "
        "another program or another user's job may listen there, or --run-id (--rdzv-id) or "
        "--token-file differ from the server's"
    ]


def made(folder: Path) -> ServerCertificate:
    folder.mkdir()
    certificate = ServerCertificate(folder / "tls-cert.pem", folder / "tls-key.pem")
    make_certificate(certificate)
    return certificate


def test_over_tls_a_node_knows_the_certificate_from_the_proof_on(tmp_path: Path) -> None:
    with serving(certificate=made(tmp_path / "tls")) as server:
        found = find(replace(plan(tmp_path, server.port), insecure=False), 0.0)
        assert found.url == server.url
        assert server.url.startswith("https://")
        assert found.fingerprint == found.seen == server.fingerprint
        with found.client() as client:
            assert client.get("job/spec") is None


def test_a_relay_with_another_certificate_gets_no_proof_through(tmp_path: Path) -> None:
    """A program in the middle ends TLS on both sides, and passes on what it decrypts."""
    with serving(certificate=made(tmp_path / "tls")) as server:
        forwarded: list[bytes] = []

        def pass_on(request: bytes) -> bytes:
            forwarded.append(request)
            path, _, body = request.partition(b"\r\n\r\n")
            with RendezvousClient(server.url, "", fingerprint=server.fingerprint) as client:
                return answered("200 OK", client.post_json(path.split()[1].decode(), body))

        with (
            listening(pass_on, made(tmp_path / "of the relay").context()) as relay,
            pytest.raises(UsageError, match="does not know this node's secret"),
        ):
            find(plan(tmp_path, relay.port), 0.0)
    assert len(forwarded) == 1, "the hello was passed on, and answered by the right server"
    assert forwarded[0].startswith(b"POST /v1/nodes/hello ")


def test_a_node_speaks_plain_only_if_it_is_told_to(tmp_path: Path) -> None:
    with serving() as server:
        told = plan(tmp_path, server.port)
        with pytest.raises(ClusterError, match="is the server and was given --insecure"):
            find(replace(told, insecure=False), 0.0)
        assert find(told, 0.0).fingerprint == ""


def test_a_node_with_a_ca_takes_no_other_certificate(tmp_path: Path) -> None:
    certificate = made(tmp_path / "tls")
    with serving(certificate=certificate) as server:
        careful = replace(plan(tmp_path, server.port), tls_ca=str(certificate.cert))
        with pytest.raises(ClusterError, match="is not trusted: its certificate is refused"):
            find(careful, 0.0)


def test_a_proof_that_the_node_has_heard_from_another_exchange_is_not_believed(
    tmp_path: Path,
) -> None:
    recorded = Handshake(make_nonce(), make_nonce())
    proof = recorded.prove(derive(SECRET), Speaker.SERVER)
    answer = HelloAnswer(recorded.server_nonce, (proof,))
    with (
        listening(lambda _: answered("200 OK", msgspec.json.encode(answer))) as hostile,
        pytest.raises(UsageError, match="does not know this node's secret"),
    ):
        find(plan(tmp_path, hostile.port), 0.0)
    assert b"/proof" not in b"".join(hostile.heard)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (b"", ClusterError, "no server at"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ClusterError, "no server at"),
        (answered("200 OK", b"[]"), ClusterError, "no server at"),
        (answered("200 OK", b'{"nonce":"..","proofs":[]}'), ClusterError, "no server at"),
        (answered("200 OK", b" " * 200_000), ClusterError, "more than [0-9]+ bytes"),
        (answered("401 Unauthorized", b"{}"), ClusterError, "older than this node's"),
        (answered("404 Not Found", b"{}"), ClusterError, "takes in no nodes .*--serve"),
        (answered("409 Conflict", b"{}"), ClusterError, "no server at"),
        (answered("302 Found", b""), ClusterError, "no server at"),
    ],
)
def test_whatever_another_program_answers_ends_in_one_line(
    tmp_path: Path, answer: bytes, error: type[ElasticError], said: str
) -> None:
    def answer_and_close(_request: bytes) -> bytes:
        if not answer:
            raise OSError("closes the connection")
        return answer

    with listening(answer_and_close) as other, pytest.raises(error, match=said):
        find(plan(tmp_path, other.port), 0.0)
    assert SECRET.encode() not in b"".join(other.heard)


def test_a_server_that_knows_the_secret_may_refuse_a_node_for_good(tmp_path: Path) -> None:
    older = msgspec.structs.replace(OFFER, version="0.9")
    with serving() as server, pytest.raises(UsageError, match="the-name has elastic-driver"):
        find_server(plan(tmp_path, server.port), older, 60.0, "--start-timeout")
