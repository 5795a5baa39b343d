"""Every parser of what comes from outside, with hostile inputs and the errors it may refuse with.

A parser returns, or raises one of `refuses`; anything else is a bug, because its caller is not
ready for it: a traceback, a dead thread, a status of 500. What it accepts has to be usable.
`examples` have broken one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
from hypothesis import strategies as st

from elastic_driver import reachability
from elastic_driver.brain.cluster import Cluster
from elastic_driver.errors import UsageError
from elastic_driver.features.goodput.ledger import Ledger
from elastic_driver.features.page import routes as page_routes
from elastic_driver.features.shards import messages as shards
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import ProgressReading, ProgressReported, Tick
from elastic_driver.job.job import Job
from elastic_driver.kernel.tables import SnapshotError
from elastic_driver.reachability import DriverPresence, Presence
from elastic_driver.runtime import endpoint, machines, run_dir
from elastic_driver.runtime.discovery import (
    MAX_HOSTS,
    MAX_SLOTS,
    HostListError,
    Hosts,
    check_host,
    parse_host_lines,
    parse_hosts,
)
from elastic_driver.runtime.event_routes import KINDS
from elastic_driver.runtime.journal import follower, tenure
from elastic_driver.runtime.journal import follower as mirror
from elastic_driver.runtime.journal.etcd import EtcdError, KeyValue
from elastic_driver.settings import Settings
from elastic_driver.words import joining as join
from elastic_driver.words import orders as documents
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import OutputLines, Progress, decode_progress
from elastic_driver.worker.checkpoints import folder as checkpoints
from launcher.agent import lifetime as probe_port
from launcher.agent import processes as stacks
from launcher.agent.output import LineSplitter
from launcher.backends.slurm_allocation import read_allocation, read_shares
from launcher.options.given import resolve
from rendezvous import wire
from rendezvous.auth import Caller, Role, Tokens, read_credentials, read_token_file
from rendezvous.errors import TokenError
from rendezvous.fast_path import MAX_BODY_BYTES, may_be_plain, read_head
from rendezvous.sessions import Sessions
from rendezvous.store import Answered, KVStore
from tests.fuzz.documents import ANYTHING, TEXTS, damaged, nearly, nearly_packed

# What `rendezvous.web.read_json` answers with 400 and 422.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class Parser:
    """A parser under test."""

    name: str
    inputs: st.SearchStrategy[Any]
    parse: Callable[[Any], object]
    refuses: tuple[type[Exception], ...] = ()
    examples: tuple[Any, ...] = ()

    def attempt(self, given: Any) -> None:
        """Parse this; fails unless it is accepted, or refused as it should be."""
        with contextlib.suppress(*self.refuses):
            self.parse(given)


def _decoder(kind: Any) -> Callable[[bytes], object]:
    return msgspec.json.Decoder(kind).decode


# ---- the rendezvous ----------------------------------------------------------------------


def carry_out(body: bytes) -> None:
    """A batch in a store: it answers, and its answer can be read."""
    batch = wire.decode_batch(body)
    store = KVStore()
    outcomes = store.submit("a", batch.operations, 0.0)
    for wait in range(len(batch.operations)):
        outcomes += store.expire((wait + 1) * 1000.0)
    (answered,) = (outcome for outcome in outcomes if isinstance(outcome, Answered))
    assert len(answered.results) == len(batch.operations)
    wire.decode_reply(wire.encode_reply(answered.results))


LINES = {
    b"POST /v1/kv:batch HTTP/1.1\r\n": "/v1/kv:batch",
    b"POST /v1/events HTTP/1.1\r\n": "/v1/events",
    b"POST /v1/shards/": "/v1/shards/",
}
HEADERS = st.sampled_from(
    (
        *("Host: a", "Content-Length: 12", "content-length:0", "Authorization: Bearer t"),
        *("Content-Length: 0012", "Content-Length: +1", "Transfer-Encoding: chunked"),
        *("Connection: close", "X-Request-Id: 1", "Accept: */*", " folded: x", "Expect: 100"),
    )
)
HEADS = st.one_of(
    st.builds(
        lambda line, headers: "\r\n".join([line, *headers]).encode(),
        st.sampled_from(
            (
                *("POST /v1/kv:batch HTTP/1.1", "POST /v1/events HTTP/1.1", "GET / HTTP/1.1"),
                *("POST /v1/shards/d:next HTTP/1.1", "POST /v1/kv:batch HTTP/1.0", "POST  "),
            )
        ),
        st.lists(HEADERS, max_size=6),
    ).flatmap(lambda head: st.one_of(st.just(head), damaged(head))),
    st.binary(max_size=200),
)


def understand_head(head: bytes) -> None:
    """A head is plain or not; each beginning of a plain one may become plain."""
    found = read_head(head, LINES)
    if found is None:
        return
    assert 0 <= found.length <= MAX_BODY_BYTES
    assert found.path.startswith("/v1/")
    assert "\r" not in f"{found.path}{found.authorization}{found.request_id}"
    whole = head + b"\r\n"
    assert all(may_be_plain(whole[:n], LINES) for n in range(len(whole)))


HEADER_VALUES = st.one_of(
    TEXTS,
    st.builds(
        "{} {}:{}:{}".format,
        st.sampled_from(("Bearer", "bearer", "Basic", "")),
        st.sampled_from(("driver", "operator", "reader", "agent", "worker", "node", "")),
        TEXTS | st.sampled_from(("h.0.1", "h", "", "h:x")),
        st.sampled_from(("", "0" * 64, "f" * 5000)) | TEXTS,
    ),
)
TOKEN_FILES = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from(("token", "sha256:00", "", " ", "-----BEGIN")), max_size=4).map(
        lambda lines: "\n".join(lines).encode()
    ),
)


def identify(header: str) -> None:
    """Nobody guesses a token."""
    assert Tokens("the driver's").identify(header) is None


def find_session(guess: str) -> None:
    """Nobody guesses a session, or the half of one that he lacks."""
    sessions = Sessions()
    begun = sessions.begin(Caller(Role.DRIVER), {sessions.cookie: guess}, 0.0)
    assert begun
    assert begun.cookie != guess
    assert sessions.find({sessions.cookie: guess}, guess, 1.0) is None
    assert sessions.find({sessions.cookie: begun.cookie}, guess, 1.0) is None
    assert sessions.find({sessions.cookie: guess}, begun.key, 1.0) is None
    assert sessions.redeem(guess, 1.0) is None


def read_token(content: bytes) -> None:
    """The file of a token, and of what else clients have to know."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "token")
        path.touch(0o600)
        path.write_bytes(content)
        assert read_token_file(path)
        read_credentials(path)


# ---- hosts -------------------------------------------------------------------------------

ENTRIES = st.one_of(
    st.from_regex(r"[a-z0-9.\[\],:=#-]{1,30}", fullmatch=True),
    st.sampled_from(
        (
            *("n1:2", "n[01-03,07]:4", "[2001:db8::7]:2", "n1 slots=4", "n1 max_slots=4", "a:0"),
            *("n[1-99][1-9]", "n:999999999", "[::1%eth0]:1", "n[١-٣]", "n[01-1]", "n[2-1]"),
            *("n[" * 500, "n" * 300, "n:٣", "n:1:2", "[]", "n[]", "n[1-]", "-o:1", "a\0b"),
        )
    ),
    TEXTS,
)
COMMA_LISTS = st.lists(ENTRIES, max_size=5).map(",".join)
HOST_FILES = st.lists(ENTRIES, max_size=5).map("\n".join)


def _usable(hosts: Hosts) -> None:
    assert len(hosts) <= MAX_HOSTS
    for name, slots in hosts:
        assert check_host(name) is None
        assert 0 <= slots <= MAX_SLOTS


def read_discovered(output: bytes) -> None:
    """What a discovery script has printed."""
    text = output.decode("utf-8", "backslashreplace")
    _usable(parse_host_lines(text, source="the script"))


SLURM_COUNTS = st.one_of(
    st.sampled_from(("2(x3),1", "4", "1(x999999)", "9" * 5000, "2(x", "٣", "a100:2", "", "-1")),
    st.from_regex(r"[0-9x(),a:]{1,20}", fullmatch=True),
    TEXTS,
)
SLURM = st.fixed_dictionaries(
    {"SLURM_JOB_ID": SLURM_COUNTS | st.just("1"), "SLURM_JOB_NODELIST": COMMA_LISTS},
    optional=dict.fromkeys(
        (
            *("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_PER_NODE"),
            *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ),
        SLURM_COUNTS,
    ),
)
SCONTROL = st.lists(
    st.one_of(
        st.just("JobId=1 JobName=x"),
        st.builds(
            "JobId={} HetJobId=1 HetJobOffset={} JobName=x".format, SLURM_COUNTS, SLURM_COUNTS
        ),
        st.builds("   NumNodes=2 NumTasks={} CPUs/Task={}".format, SLURM_COUNTS, SLURM_COUNTS),
        st.builds(
            "     Nodes={} CPU_IDs={} Mem=1 GRES={}".format, COMMA_LISTS, SLURM_COUNTS, SLURM_COUNTS
        ),
        st.builds(
            "   TresPer{}=gres:gpu:{}".format, st.sampled_from(("Job", "Task")), SLURM_COUNTS
        ),
        st.text(max_size=40),
    ),
    max_size=6,
).map("\n".join)


# ---- options -----------------------------------------------------------------------------

WORDS = st.one_of(
    st.sampled_from(
        (
            *("-np", "--min-np", "--max-np", "-H", "--rdzv-conf", "--rdzv_conf=a=1,b", "-m"),
            *("--env", "--env=A", "--start-timeout=nan", "--heartbeat-timeout", "1e999", "inf"),
            *("--", "-", "--config-file", "/dev/null", "-np=2", "-np2", "9" * 5000, "2", "a:b"),
            *("--nnodes=1:2", "--nnodes=:", "--nproc-per-node", "--standalone", "--journal"),
        )
    ),
    TEXTS,
)
VARIABLES = st.dictionaries(
    st.sampled_from(
        ("ELASTICRUN_MIN_NP", "ELASTICRUN_ENV", "PET_NNODES", "PET_RDZV_CONF", "ELASTICRUN_X")
    ),
    WORDS,
    max_size=2,
)
OPTION_LINES = st.one_of(
    st.sampled_from(
        (
            *("min-np: 2", "env: {A: 1}", "env: [A, B]", "hosts: [a, b]", "a: &a [*a]", "? [1]: 2"),
            *("min-np: [[[1]]]", "!!python/object:os.system {}", "<<: *x", "min-np: !!int x"),
            *("env: {[a]: 1}", "&a a: *a", "min_np: 1_0", "env: {A: {B: 1}}", "env:\n  - {a: 1}"),
            *("min-np: '2", "- a", "\t", "%YAML 9.9\n---"),
        )
    ),
    TEXTS,
)


def read_option_file(content: bytes) -> None:
    """`--config-file`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "options.yaml")
        path.write_bytes(content)
        resolve(["--config-file", str(path), "true"], {})


# ---- machines that answer requests -------------------------------------------------------


def ask_tensorflow(given: tuple[type[Any], bytes]) -> None:
    """A request for TensorFlow's cluster, then time."""
    kind, content = given
    machine = TfCluster(30.0)
    request = tf.TfRequest(1, msgspec.json.decode(content, type=kind))
    assert machines.decode_event(machines.encode_event(request)) == request
    machine.handle(request, 1.0)
    machine.check()
    machine.handle(Tick(), 100.0)
    machine.check()


def ask_shards(given: tuple[type[Any], bytes]) -> None:
    """A request for a data set, twice, then time."""
    kind, content = given
    machine = DataSets()
    body = msgspec.json.decode(content, type=kind)
    for ticket in (1, 2):
        request = shards.ShardRequest(ticket, "d", body)
        batch = shards.ShardBatch((request,))
        assert machines.decode_event(machines.encode_event(batch)) == batch
        machine.handle(request, 1.0)
        machine.check()
    machine.handle(Tick(), 100.0)
    machine.check()


def _with_kind(*kinds: type[Any]) -> st.SearchStrategy[tuple[type[Any], bytes]]:
    return st.one_of(*(st.tuples(st.just(kind), nearly(kind)) for kind in kinds))


# ---- the driver, its journal and its agents ----------------------------------------------


def take_event(body: bytes) -> None:
    """An event of the wire; the journal keeps it as it is."""
    event = msgspec.json.decode(body, type=KINDS)
    assert machines.decode_event(machines.encode_event(event)) == event


LARGE = b"1" * 40


def read_progress(body: bytes) -> None:
    """What a worker has written about itself: the driver makes an event of it."""
    found = decode_progress(body)
    if found is not None:
        reading = ProgressReading(found.step, found.step_time, answered=True)
        machines.encode_event(ProgressReported(1, (reading,)))


def read_world(body: bytes) -> None:
    """The world of a round; each member can be read."""
    members = documents.decode_world(body).members
    if members:
        assert members[0].place.rank == 0
        assert members[-1].place.rank == len(members) - 1


def _hear(connection: asyncio.Protocol, chunks: list[bytes]) -> _Transport:
    """Let a connection hear this until it closes, and end it; return what it spoke to."""
    transport = _Transport()
    connection.connection_made(cast("asyncio.Transport", transport))
    for chunk in chunks:
        if not transport.closed:
            connection.data_received(chunk)
    connection.connection_lost(None)
    return transport


def hear_driver(chunks: list[bytes]) -> None:
    """Bytes at the port where an agent answers probes; none is a driver's message."""

    async def hear() -> None:
        heard: list[bytes] = []
        port = probe_port.ProbePort(Presence("secret", "a", 1).answer, heard.append)
        _hear(probe_port._Connection(port), chunks)
        for line in heard:
            assert reachability.verified(line, "run", "secret") is None

    asyncio.run(hear())


def hear_brain(chunks: list[bytes]) -> None:
    """Bytes at the port where a driver proves that it lives; none is a Brain's question."""

    async def hear() -> None:
        lines = endpoint._Lines(DriverPresence("secret", 1.0, "127.0.0.1:2000"))
        transport = _hear(endpoint._Line(lines), chunks)
        assert not transport.said
        assert not lines.unproved
        assert not lines.kept

    asyncio.run(hear())


class _Transport:
    said = b""
    closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.said += data

    def close(self) -> None:
        self.closed = True

    abort = close


def read_etcd(value: bytes) -> None:
    """A value under any key of a run in etcd."""
    found = KeyValue(b"/elastic/run/driver", value)
    refused = 0
    for read in (
        lambda: tenure.decode_key(found),
        lambda: follower._decode(found, mirror.About),
        lambda: follower._decode(found, mirror.Ended),
        lambda: follower._decode_rows(value),
    ):
        try:
            read()
        except EtcdError:
            refused += 1
    if refused:
        raise EtcdError("refused")


def read_manifest(content: bytes) -> None:
    """A checkpoint's manifest whose checksum is right."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "step-000000000001-a")
        path.mkdir()
        digest = hashlib.sha256(content).hexdigest().encode()
        (path / checkpoints.MANIFEST).write_bytes(digest + b"\n" + content)
        checkpoints.read_document(path / checkpoints.MANIFEST, checkpoints.Report)
        checkpoints.verified(path)


def read_run(content: bytes) -> None:
    """`endpoint.json` in a run's folder."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "endpoint.json").write_bytes(content)
        run_dir.read_endpoint(Path(name))


def split_lines(chunks: list[bytes]) -> None:
    """A worker's output: no byte of a line is lost, and little is held back."""
    splitter = LineSplitter(max_line=64)
    for chunk in chunks:
        assert all(len(line) <= 65 for line in splitter.feed(chunk))
    assert all(len(line) <= 65 for line in splitter.finish())


PACKED_EVENTS = nearly(
    ev.WireEvent,
    pack=lambda value: (
        msgspec.msgpack.encode(msgspec.convert(value, ev.WireEvent))
        if _converts(value)
        else b"\x80"
    ),
).flatmap(damaged)


def _converts(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(msgspec.convert(value, ev.WireEvent))
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


def _snapshots() -> st.SearchStrategy[bytes]:
    """Snapshots of machines, damaged, and others that were never of one."""
    true = [machine.snapshot() for machine in MACHINES]
    tables = ANYTHING | st.dictionaries(TEXTS, ANYTHING, max_size=3)
    names = TEXTS | st.sampled_from([type(machine).__name__ for machine in MACHINES])
    made = st.tuples(st.integers(1, 3), names, st.integers(0, 2), tables)
    return st.one_of(st.sampled_from(true).flatmap(damaged), made.map(_packed), st.binary())


MACHINES = (DataSets(), TfCluster(30.0), Ledger(), Cluster(), Job(Settings(start_np=2)))


def restore(snapshot: bytes) -> None:
    """Make each machine of a snapshot, or be refused; the last refusal is raised."""
    refusals = []
    for machine in MACHINES:
        try:
            type(machine).restored(snapshot)
        except SnapshotError as refusal:
            refusals.append(refusal)
    if len(refusals) == len(MACHINES):
        raise refusals[-1]


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b""


CHUNKS = st.lists(st.binary(max_size=80) | st.just(b"a" * 5000) | st.just(b"\n"), max_size=6)
PARSERS = (
    Parser("batch", nearly(wire.KVBatch), carry_out, NOT_JSON),
    Parser("reply", nearly(wire.BatchReply), wire.decode_reply, NOT_JSON),
    Parser("error", nearly(wire.ErrorBody), wire.decode_error, NOT_JSON),
    Parser("head", HEADS, understand_head),
    Parser(
        "hosts",
        COMMA_LISTS,
        lambda text: _usable(parse_hosts(text)),
        (HostListError,),
        ("n[1-999999999]", "n[1-99][1-99][1-99]"),
    ),
    Parser(
        "hostfile",
        HOST_FILES,
        lambda text: _usable(parse_host_lines(text, source="f")),
        (HostListError,),
    ),
    Parser("discovery", st.binary(max_size=300), read_discovered, (HostListError,)),
    Parser("slurm", SLURM, read_allocation, (UsageError,)),
    Parser("scontrol", SCONTROL, lambda text: read_shares(text, "1", {}), (UsageError,)),
    Parser(
        "options",
        st.tuples(st.lists(WORDS, max_size=6), VARIABLES),
        lambda given: resolve(*given),
        (UsageError,),
        ((["--config-file", "\ud800"], {}), (["--config-file", "a\0b"], {})),
    ),
    Parser(
        "options file",
        st.lists(OPTION_LINES, max_size=4).map(
            lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
        ),
        read_option_file,
        (UsageError,),
        (b"[" * 500, b"{a: " * 500),
    ),
    Parser(
        "tensorflow",
        _with_kind(tf.ClusterSpecRequest, tf.BarrierRequest, tf.SynchronizeRequest, tf.LookRequest),
        ask_tensorflow,
        NOT_JSON,
    ),
    Parser(
        "shards",
        _with_kind(
            *(shards.NextRequest, shards.DoneRequest, shards.ResumeRequest, shards.AgreeRequest),
            *(shards.ExtendRequest, shards.ShardCheckpoint),
        ),
        ask_shards,
        NOT_JSON,
    ),
    Parser(
        "event",
        nearly(KINDS),
        take_event,
        NOT_JSON,
        (  # numbers that the journal cannot hold
            b'{"type":"agent_ready","host":"a","incarnation":1,"pid":1,"address":"b",'
            b'"ports":[18446744073709551616]}',
            b'{"type":"agent_ready","host":"a","incarnation":1,"pid":1,"address":"b",'
            b'"ports":[],"slot_ports":[-9223372036854775809]}',
        ),
    ),
    Parser("output", nearly(OutputLines), _decoder(OutputLines), NOT_JSON),
    Parser("join", nearly(join.NodeReport), _decoder(join.NodeReport), NOT_JSON),
    Parser("hello", nearly(join.Hello), _decoder(join.Hello), NOT_JSON),
    Parser("proof", nearly(join.NodeProof), _decoder(join.NodeProof), NOT_JSON),
    Parser("token", HEADER_VALUES, identify),
    Parser("session", HEADER_VALUES, find_session),
    Parser("login", nearly(page_routes.Login), _decoder(page_routes.Login), NOT_JSON),
    Parser("token file", TOKEN_FILES, read_token, (TokenError,)),
    Parser("world", nearly(documents.WorldDocument), read_world, (ValueError, RecursionError)),
    Parser("state", nearly(documents.StateQuestion), documents.decode_question, NOT_JSON),
    Parser("order", nearly(documents.Order), documents.decode_order, NOT_JSON),
    Parser(
        "progress",
        nearly(Progress),
        read_progress,
        (),
        (b'{"more":' + b"[" * 2000, b'{"\xff":1}', b'{"round":1,"step":%b,"step_time":1}' % LARGE),
    ),
    Parser("probe port", CHUNKS, hear_driver),
    Parser("liveness port", CHUNKS, hear_brain),
    Parser(
        "announcement",
        nearly(reachability.Announcement),
        lambda line: reachability.verified(line, "run", "secret"),
    ),
    Parser(
        "stack",
        nearly(tuple[stacks._ThreadStack, ...]),
        lambda out: stacks.seen_in(out, 1),
        (),
        (b"[" * 2000, b'["\xff"]'),
    ),
    Parser("journal event", PACKED_EVENTS, machines.decode_event, (ValueError, LookupError)),
    Parser("snapshot", _snapshots(), restore, (SnapshotError,)),
    Parser("etcd", nearly(tenure.DriverKey) | nearly_packed(list[Any]), read_etcd, (EtcdError,)),
    Parser(
        "manifest",
        nearly(checkpoints.Manifest) | nearly(checkpoints.Report),
        read_manifest,
        (checkpoints.DamagedError, checkpoints.OtherFormatError),
    ),
    Parser("endpoint", nearly(run_dir.Endpoint), read_run),
    Parser("lines", CHUNKS, split_lines),
)
