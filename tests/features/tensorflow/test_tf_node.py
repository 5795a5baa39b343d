"""Orchestrators of TensorFlow against the driver's real routes, one thread a node."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.features.tensorflow.worker import ClusterSpec, TfClusterError, TfNode, tf_config
from rendezvous.auth import write_token_file
from tests.support.machines import serve
from tests.support.orchestrators import Orchestrators


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Orchestrators]:
    with Orchestrators(tmp_path, lease=3.0) as made:
        for name in "abc":
            made.add(name, f"10.0.0.{ord(name)}:5000")
        yield made


def members(spec: ClusterSpec) -> str:
    """The names of a cluster's nodes, by index."""
    return "".join(chr(int(address[7:-5])) for address in spec.cluster["worker"])


def test_a_single_node_connects(nodes: Orchestrators) -> None:
    alone = nodes.add("x", "10.0.0.1:1", least=1, most=1)
    assert alone.cluster_spec(10).cluster == {"worker": ["10.0.0.1:1"]}


def test_several_connect_and_agree(nodes: Orchestrators) -> None:
    specs = nodes.together("a", "b", "c")
    assert len({members(spec) for spec in specs.values()}) == 1
    assert {spec.generation for spec in specs.values()} == {1}
    for name, spec in specs.items():
        assert members(spec)[spec.task.index] == name


def test_tf_config_is_made_of_the_spec(nodes: Orchestrators) -> None:
    spec = nodes.together("a", "b")["a"]
    assert json.loads(tf_config(spec.cluster, spec.task)) == {
        "cluster": spec.cluster,
        "task": {"type": "worker", "index": spec.task.index},
    }


def test_two_grow_to_three_and_shrink_to_two(nodes: Orchestrators) -> None:
    assert sorted(members(nodes.together("a", "b")["a"])) == ["a", "b"]
    newcomer = nodes.join("c")
    nodes.until_waiting("a", 1)
    grown = nodes.together("a", "b")
    assert members(newcomer.result(20))[2] == "c"
    assert grown["a"].generation == 2
    shrunk_a, shrunk_c = nodes.join("a"), nodes.join("c")
    nodes.until_waiting("b", 2)  # b goes: it asks no more, and is lost after a lease
    assert not shrunk_a.done()
    assert sorted(members(shrunk_a.result(30))) == ["a", "c"]
    assert shrunk_c.result(30).generation == 3


def test_a_wait_that_is_over_says_what_was_missing(nodes: Orchestrators) -> None:
    with pytest.raises(TfClusterError, match="1 node waits, 2 needed") as caught:
        nodes.join("a", timeout=0.3).result(10)
    assert (caught.value.code, caught.value.exit_code) == ("timed_out", 75)


def test_all_get_everybodys_value(nodes: Orchestrators) -> None:
    spec = nodes.together("a", "b")["a"]
    asked = [
        nodes.call(name, lambda node: node.synchronize("lr", node.address.encode() + b"\0\xff", 10))
        for name in ("a", "b")
    ]
    values = [call.result(20) for call in asked]
    assert values[0] == values[1]
    assert list(values[0]) == spec.cluster["worker"], "in the order of the indices"
    assert values[0]["10.0.0.97:5000"] == b"10.0.0.97:5000\0\xff"


def test_a_barrier_holds_until_the_last_has_come(nodes: Orchestrators) -> None:
    nodes.together("a", "b")
    early = nodes.call("a", lambda node: node.barrier("epoch", 10))
    nodes.call("b", lambda node: node.waiting_nodes()).result(10)
    assert not early.done()
    nodes.call("b", lambda node: node.barrier("epoch", 10)).result(10)
    early.result(10)


def test_all_who_wait_hear_of_a_time_out_and_of_a_failure(nodes: Orchestrators) -> None:
    nodes.together("a", "b", "c")
    asked = [nodes.call(name, lambda node: node.barrier("x", 0.5)) for name in ("a", "b")]
    for call in asked:
        with pytest.raises(TfClusterError, match=r"timed out: 10\.0\.0\.99:5000 \(1 of 3\)"):
            call.result(10)
    waiting = nodes.call("a", lambda node: node.synchronize("y", b"", 10))
    failing = nodes.call("b", lambda node: node.synchronize("y", b"", 10, failure="no disk left"))
    for call in (waiting, failing):
        with pytest.raises(TfClusterError, match=r"10\.0\.0\.98:5000 says: no disk left"):
            call.result(10)


def test_who_leaves_ends_the_wait_of_the_others(nodes: Orchestrators) -> None:
    nodes.together("a", "b")
    waiting = nodes.call("a", lambda node: node.synchronize("x", b"", 60))
    leaving = nodes.join("b", timeout=0.1)
    with pytest.raises(TfClusterError, match="asked for the next cluster") as caught:
        waiting.result(10)
    assert caught.value.code == "member_gone"
    with pytest.raises(TfClusterError, match="1 members train in generation 1"):
        leaving.result(10)


def test_outside_of_a_job_the_driver_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_RENDEZVOUS", raising=False)
    with pytest.raises(UsageError, match="endpoint="):
        TfNode("a:1", min_nodes=1, max_nodes=1)


def test_a_node_of_a_job_waits_for_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token_file(tmp_path / "token", "secret")
    with serve(TfCluster(3.0), "secret") as server:
        port = server.port
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("ELASTIC_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("ELASTIC_WORKER_ID", "a.0.1")
    monkeypatch.setenv("ELASTIC_DRIVER_TIMEOUT", "60")
    monkeypatch.setattr("elastic_driver.features.tensorflow.worker.ANSWER_S", 0.2)
    with TfNode("10.0.0.1:1", min_nodes=1, max_nodes=1) as node:
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(node.changed()))
        asking.start()
        asking.join(1.0)
        assert asking.is_alive(), "longer than a driver may take to answer"
        with serve(TfCluster(3.0), "secret", port=port):
            asking.join(10.0)
        assert answers == [False], "the cluster of the next driver has no change for it"
