"""`elasticrun --tf-orchestrator`: TensorFlow nodes that others start meet without a job."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from elastic_driver.features.tensorflow.worker import TfNode
from elastic_driver.runtime.run_dir import read_endpoint
from launcher import cli, ctl
from rendezvous.auth import write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.tls import ServerCertificate, make_certificate
from tests.support.job import eventually
from tests.support.nodes import Node, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECRET = "a-secret-of-so-many-characters"


class Service:
    """A running service, and TensorFlow nodes that know its secret."""

    def __init__(self, folder: Path, nodes: Nodes, *, secure: bool = False) -> None:
        self.state, self.secret = folder / "state", write_token_file(folder / "secret", SECRET)
        self.known_by = ""
        where = ("--state-dir", str(self.state), "--run-id", "tf")
        flags = ["--token-file", str(self.secret), "--heartbeat-timeout", "5", "--debug"]
        if secure:
            made = ServerCertificate(folder / "cert.pem", folder / "key.pem")
            make_certificate(made)
            flags += ["--tls-cert", str(made.cert), "--tls-key", str(made.key)]
            self.known_by = made.fingerprint()
        self.process: Node = nodes.start("--tf-orchestrator", *where, *flags)
        self.process.said(f"serving TensorFlow nodes at http{'s' * secure}://127.0.0.1:")
        write_token_file(self.secret, SECRET, self.known_by)  # as its nodes have it
        found = read_endpoint(self.state / "tf")
        assert found is not None
        self.url = found.url

    def node(self, address: str, most: int = 3) -> TfNode:
        return TfNode(
            address,
            min_nodes=2,
            max_nodes=most,
            gather=0.1,
            endpoint=self.url,
            token_file=str(self.secret),
        )

    def read(self, path: str) -> str:
        with RendezvousClient(self.url, SECRET, fingerprint=self.known_by) as client:
            return client.get_bytes(path).decode()

    def ctl(self, *words: str) -> int:
        return ctl.main([*words, "--state-dir", str(self.state)])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Nodes(tmp_path) as nodes:
        yield Service(tmp_path, nodes)


@pytest.fixture
def secure_service(tmp_path: Path) -> Iterator[Service]:
    """It speaks TLS, as one does that listens beyond this machine."""
    with Nodes(tmp_path) as nodes:
        yield Service(tmp_path, nodes, secure=True)


def test_nodes_form_a_cluster_and_members_waiting_and_lost_nodes_are_shown(
    secure_service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service = secure_service
    with ThreadPoolExecutor(3) as pool:
        nodes = [service.node("10.0.0.1:5000", 2), service.node("10.0.0.2:5000", 2)]
        first = pool.submit(nodes[0].cluster_spec, 20.0)
        eventually(lambda: nodes[1].waiting_nodes().waiting, within=20, what="the first node waits")
        cluster = {"worker": ["10.0.0.1:5000", "10.0.0.2:5000"]}
        assert nodes[1].cluster_spec(20.0).cluster == first.result(20).cluster == cluster
        third = service.node("10.0.0.3:5000", 2)
        late = pool.submit(third.cluster_spec, 30.0)
        eventually(
            lambda: nodes[0].waiting_nodes().waiting == ("10.0.0.3:5000",),
            within=20,
            what="the third node waits",
        )
        document = json.loads(service.read("/v1/status"))
        assert (document["state"], document["tf"]["generation"]) == ("serving", 1)
        assert sorted(document["tf"]["members"]) == ["10.0.0.1:5000", "10.0.0.2:5000"]
        assert service.ctl("status") == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("run tf serves TensorFlow nodes for ")
        assert [" ".join(line.split()) for line in shown[3:]] == [
            "10.0.0.1:5000 worker 0 generation 1",
            "10.0.0.2:5000 worker 1 generation 1",
            "10.0.0.3:5000 - waiting",
        ]
        metrics = service.read("/metrics")
        assert 'elastic_tf_nodes{state="member"} 2.0' in metrics
        assert 'elastic_tf_nodes{state="waiting"} 1.0' in metrics
        eventually(  # the second node says nothing any more
            lambda: nodes[0].waiting_nodes().lost == ("10.0.0.2:5000",),
            within=20,
            what="the second node is lost",
        )
        assert nodes[0].cluster_spec(20.0).cluster == late.result().cluster
        assert "elastic_tf_generation 2.0" in service.read("/metrics")
        for node in (*nodes, third):
            node.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_service_and_every_request_that_waits(
    service: Service, number: signal.Signals, code: int
) -> None:
    body = {"address": "10.0.0.1:5000", "min_nodes": 2, "max_nodes": 2}
    headers = {"Authorization": f"Bearer {SECRET}"}
    with ThreadPoolExecutor(1) as pool:
        url = f"{service.url}/v1/tf/cluster_spec"
        waiting = pool.submit(requests.post, url, json=body, headers=headers, timeout=60)
        with service.node("10.0.0.9:5000") as other:
            eventually(lambda: other.waiting_nodes().waiting, within=20, what="a node waits")
        service.process.signal(number)
        assert service.process.wait(20) == code
        answer = waiting.result(20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
    assert "Traceback" not in service.process.stderr
    assert list((service.state / "tf").glob("*")) == [service.state / "tf" / "events.jsonl"]


def test_what_needs_a_job_is_refused_in_a_line(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.ctl("hosts", "--json") == 64
    assert "run tf serves TensorFlow nodes and has no job" in capsys.readouterr().err
    assert service.ctl("stop") == 0
    assert service.process.wait(20) == 143
    assert cli.main(["--tf-orchestrator", "train.py"]) == 64
    assert "--tf-orchestrator runs no command" in capsys.readouterr().err
