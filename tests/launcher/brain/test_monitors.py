"""`elasticbrain monitor` with this machine, a real node_exporter, and what sinfo prints."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.ports import free_port

pytest.importorskip("sqlalchemy")

from elastic_driver import contract
from elastic_driver.brain.algorithm import HostView
from elastic_driver.brain.monitoring import Monitor, MonitorOptions
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import Node
from elastic_driver.errors import UsageError
from launcher.backends.base import MONITORS, load
from launcher.brain import commands, monitors
from launcher.brain.commands import Watch
from launcher.brain.monitors import Agents, Prometheus, workers
from launcher.brain.statistics_reader import host_view
from tests.support.certificates import CertificateAuthority
from tests.support.job import eventually

EXPORTER = shutil.which("prometheus-node-exporter")
needs_exporter = pytest.mark.skipif(
    EXPORTER is None, reason="node_exporter is not installed (prometheus-node-exporter)"
)


@contextlib.contextmanager
def exporter(port: int) -> Iterator[None]:
    """A node_exporter that answers on this port."""
    assert EXPORTER is not None
    argv = [EXPORTER, f"--web.listen-address=127.0.0.1:{port}", "--collector.disable-defaults"]
    process = subprocess.Popen(
        [*argv, "--collector.cpu", "--collector.meminfo"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        eventually(answers, within=20, what="node_exporter answers")
        yield
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def watching(monitor: Monitor, address: Address) -> Iterator[list[str]]:
    """Have a monitor write into a database; what it tells."""
    told: list[str] = []
    watch = Watch(monitor, Database(address), told.append)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield told
    finally:
        watch.stop(0)
        thread.join(20)
        assert not thread.is_alive()


def nodes(address: Address, now: float | None = None) -> list[Node]:
    database = Database(address)
    try:
        return database.nodes(time.time() if now is None else now)
    finally:
        database.close()


def test_ours_are_found_by_name_and_another_name_is_refused() -> None:
    assert isinstance(load(MONITORS, "agents")(MonitorOptions()), Agents)
    with pytest.raises(UsageError, match="--source promtheus: did you mean prometheus"):
        load(MONITORS, "promtheus")
    with pytest.raises(UsageError, match="needs the hosts to ask"):
        Prometheus(MonitorOptions())
    with pytest.raises(UsageError, match="measures its own machine"):
        Agents(MonitorOptions(hosts=(("n1", 1), ("n2", 1))))


def test_a_machine_measures_itself_and_counts_the_workers_of_jobs() -> None:
    found = Agents(MonitorOptions(hosts=(("n1", 4),)))
    (before,) = found.look(5.0)
    assert (before.name, before.seen, before.slots) == ("n1", 5.0, 4)
    assert before.memory_total is not None
    assert before.memory_free is not None
    assert 0 < before.memory_free < before.memory_total <= psutil.virtual_memory().total
    assert before.idle is not None
    assert 0 <= before.idle <= 4
    (after,) = found.look(6.0)
    assert after.cpu is not None
    assert 0 <= after.cpu <= 1


def test_workers_of_jobs_are_counted_and_their_children_are_not() -> None:
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]

    def started(worker: str) -> subprocess.Popen[bytes]:
        names = {contract.RUN_ID: "run", contract.WORKER_ID: worker} if worker else {}
        environ = {**os.environ, **names}
        return subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)

    processes = [started(name) for name in ("n1.0.1", "n1.0.1", "n1.1.1", "")]
    try:
        assert workers(psutil.Process(each.pid) for each in processes) == 2
    finally:
        for process in processes:
            process.communicate(timeout=20)


@needs_exporter
def test_figures_of_a_node_exporter_come_into_the_database_and_grow_old(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "INTERVAL_S", 0.2)
    port = free_port()
    monitor = Prometheus(MonitorOptions(hosts=(("127.0.0.1", 4), ("127.0.0.9", 2)), port=port))
    with contextlib.ExitStack() as stack:
        with exporter(port):
            told = stack.enter_context(watching(monitor, address))
            eventually(lambda: nodes(address), within=20, what="a node")
            eventually(lambda: nodes(address)[0].cpu is not None, within=20, what="its processors")
            (node,) = nodes(address)
        assert (node.name, node.slots, node.idle) == ("127.0.0.1", 4, None)
        assert node.memory_total == pytest.approx(psutil.virtual_memory().total, rel=0.05)
        assert node.memory_free == pytest.approx(psutil.virtual_memory().available, rel=0.3)
        eventually(lambda: told, within=20, what="a line that nothing answers")
        (last,) = nodes(address)
        assert nodes(address, last.seen + 31) == [], "figures older than 30 s place nothing"
        with exporter(port):
            eventually(lambda: nodes(address)[0].seen > last.seen, within=20, what="a newer look")
            eventually(lambda: len(told) == 2, within=20, what="a line that it goes on")
            stack.close()
    assert told[0].startswith(f"nothing could be measured: no host answers; 127.0.0.1:{port}: ")
    assert told[0].endswith("; it is tried again")
    assert told[1] == "the machines are measured again"


def test_an_answer_that_is_no_node_exporters_is_refused() -> None:
    with pytest.raises(ValueError, match="is it a node_exporter"):
        monitors.read_exporter("up 1\n")
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own words
        monitors.read_exporter("<html>no metrics</html>\n")


GOOD = (
    "# TYPE node_cpu_seconds_total counter\n"
    'node_cpu_seconds_total{cpu="0",mode="idle"} 5\n'
    "node_memory_MemAvailable_bytes 1000\nnode_memory_MemTotal_bytes 4000\n"
)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (GOOD.replace("1000", "NaN"), "it counts nan"),
        (GOOD.replace("1000", "+Inf"), "it counts inf"),
        (GOOD.replace("4000", "1e300"), "it counts 1e"),
        (GOOD.replace("} 5", "} -5"), "it counts -5"),
    ],
)
def test_figures_that_cannot_be_are_refused(wrong: str, said: str) -> None:
    assert monitors.read_exporter(GOOD).memory_total == 4000
    with pytest.raises(ValueError, match=said):
        monitors.read_exporter(wrong)


@contextlib.contextmanager
def served(answer: bytes, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer each connection with these bytes, slowly at the end; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client = listener.accept()[0]
                    if context is not None:
                        client = context.wrap_socket(client, server_side=True)
                    with client:
                        client.recv(4096)
                        client.sendall(answer)
                        if not answer.endswith(b"\n"):  # the rest never comes
                            client.settimeout(20)
                            while client.recv(1):
                                pass
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)


ANSWER = f"HTTP/1.0 200 OK\r\nContent-Length: {len(GOOD)}\r\n\r\n{GOOD}".encode()


def test_exporters_of_other_machines_are_asked_over_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(monitors, "is_loopback", lambda _host: False)
    authority, other = CertificateAuthority(tmp_path / "a"), CertificateAuthority(tmp_path / "b")
    files = authority.certificate("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)

    def look(port: int, **more: Any) -> Sequence[Node]:
        return Prometheus(MonitorOptions((("127.0.0.1", 2),), port=port, **more)).look(5.0)

    with served(ANSWER, context) as port:
        (node,) = look(port, ca=str(authority.ca))
        assert node == Node("127.0.0.1", 5.0, 2, None, None, 1000, 4000)
        with pytest.raises(OSError, match="its certificate is not right"):
            look(port, ca=str(other.ca))
        with pytest.raises(OSError, match="its certificate is not right"):
            look(port)
    with served(ANSWER) as port:
        with pytest.raises(OSError, match="speaks no TLS that we know; --insecure asks it"):
            look(port, ca=str(authority.ca))
        assert look(port, insecure=True) == [node]
    with pytest.raises(UsageError, match="--tls-ca /nowhere/ca: No such file"):
        look(1, ca="/nowhere/ca")


def test_an_exporter_that_never_ends_its_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitors, "EXPORTER_S", 60.0)
    monkeypatch.setattr(monitors, "WHOLE_S", 0.5)
    with served(ANSWER) as good, served(ANSWER[:-5]) as slow:
        monitor = Prometheus(MonitorOptions((("127.0.0.1", 2),), port=slow))
        began = time.monotonic()
        with pytest.raises(OSError, match="no host answers"):
            monitor.look(5.0)
        assert time.monotonic() - began < 15
        assert Prometheus(MonitorOptions((("127.0.0.1", 2),), port=good)).look(5.0)


def test_figures_of_the_database_that_cannot_be_count_as_not_known() -> None:
    right = Node("n1", 5.0, 2, 1, 0.5, 1000, 4000)
    assert host_view(right) == HostView(name="n1", slots=2, cpu=0.5, memory_free=1000, idle=1)
    for cpu, count in ((float("nan"), -1), (-0.1, 2**60), (5.0, "many"), ("x", 0.5)):
        wrong: Any = Node("n1", 5.0, count, count, cpu, count, count)  # type: ignore[arg-type]
        assert host_view(wrong) == HostView(name="n1", slots=0)


def test_a_database_that_is_away_is_told_once_and_written_again(
    in_file: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "INTERVAL_S", 0.1)
    folder = os.path.dirname(in_file.file)
    os.rename(folder, folder + ".away")
    with watching(Agents(MonitorOptions()), in_file) as told:
        eventually(lambda: told, within=20, what="a line")
        os.rename(folder + ".away", folder)
        eventually(lambda: len(told) == 2, within=20, what="a line that it goes on")
    assert told == [
        "nothing could be measured: No such file or directory; it is tried again",
        "the machines are measured again",
    ]
    assert len(nodes(in_file)) == 1


def test_sinfos_lines_are_read_and_nodes_that_take_no_jobs_left_out() -> None:
    text = (
        "n1|2/6/0/8|4.00|1000|4000|mixed\n"
        "n1|2/6/0/8|4.00|1000|4000|mixed\n"  # once for each partition
        "n2|0/8/0/8|N/A|N/A|4000|idle\n"
        "n3|0/0/8/8|0.10|1000|4000|down*\n"
        "n4|0/8/0/8|0.10|1000|4000|drained\n"
        "n5|0/8/0/8|0.10|1000|4000|idle*\n"
        "n6|8/0/0/8|16.0|1000|4000|allocated\n"
    )
    mib = 1 << 20
    assert monitors.read_sinfo(text, MonitorOptions(hosts=(("n1", 4),)), 7.0) == [
        Node("n1", 7.0, 4, 3, 0.5, 1000 * mib, 4000 * mib),
        Node("n2", 7.0, 8, 8, None, None, 4000 * mib),
        Node("n6", 7.0, 8, 0, 1.0, 1000 * mib, 4000 * mib),
    ]
    with pytest.raises(ValueError, match="sinfo printed 'slurm_load_partitions"):
        monitors.read_sinfo("slurm_load_partitions: error", MonitorOptions(), 7.0)
