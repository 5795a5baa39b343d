"""Who serves and who joins, for every way to say it."""

from __future__ import annotations

import pytest

from elastic_driver.errors import UsageError
from launcher.launch.host_source import Join, Serve, decide_role, with_node_count
from launcher.options.given import resolve

ALL = "0.0.0.0"  # noqa: S104 - nothing is bound
HERE = {"me", "10.0.0.1", "localhost", "127.0.0.1", ALL}


def role(*argv: str, taken: bool = False, **environ: str) -> Serve | Join | None:
    line = with_node_count(resolve([*argv, "--", "train.py"], environ), environ)
    return decide_role(line, environ, lambda host, _port: host in HERE and not taken)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--serve", "--nnodes", "2:4"], Serve(ALL, 29400, own=False)),
        (["--serve", "--rdzv-endpoint", "me:7"], Serve("me", 7, own=False)),
        (["--serve", "--rdzv-endpoint", "me"], Serve("me", 29400, own=False)),
        (["--join", "me:7"], Join("me", 7)),
        (["--join", "other"], Join("other", 29400)),
        (["--join", "[fe80::1]:7"], Join("fe80::1", 7)),
    ],
)
def test_what_is_said_in_so_many_words(argv: list[str], expected: Serve | Join | None) -> None:
    assert role(*argv) == expected


@pytest.mark.parametrize(
    ("endpoint", "taken", "expected"),
    [
        ("me:7", False, Serve("me", 7, own=True, by_name=True)),
        ("me:7", True, Join("me", 7)),  # a second node of this machine
        ("other:7", False, Join("other", 7)),
        ("localhost:7", False, Serve("localhost", 7, own=True, by_name=True)),
        ("me", False, Serve("me", 29400, own=True, by_name=True)),
        ("127.0.0.1:0", False, Serve("127.0.0.1", 29400, own=True, by_name=True)),
        (f"{ALL}:7", False, Serve(ALL, 7, own=True)),
    ],
)
def test_the_same_command_on_every_node(
    endpoint: str, taken: bool, expected: Serve | Join | None
) -> None:
    for nodes in ("2", "1:2", "2:4"):
        for more in ([], ["--rdzv-backend", "c10d", "--rdzv-id", "x"]):
            argv = ["--nnodes", nodes, "--rdzv-endpoint", endpoint, *more]
            assert role(*argv, taken=taken) == expected


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["-np", "2"],
        ["--rdzv-endpoint", "me:7"],
        ["--rdzv-endpoint", "me:7", "-np", "2"],
        ["--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1"],
        ["--rdzv-endpoint", "me:7", "--nnodes", "1:1", "--nproc-per-node", "2"],
        ["--rdzv-endpoint", "me:7", "--nnodes", "2", "-H", "a,b"],
        ["--rdzv-endpoint", "me:7", "--nnodes", "2", "--hostfile", "h"],
        ["--rdzv-endpoint", "me:7", "--nnodes", "2", "--host-discovery-script", "s"],
        ["--standalone", "--nnodes", "2", "--rdzv-endpoint", "me:7"],
        ["--nnodes", "1:4", "--nproc-per-node", "2"],
        ["--nnodes", "1", "--node-rank", "0", "--master-addr", "me"],
    ],
)
def test_jobs_whose_hosts_are_started_from_here(argv: list[str]) -> None:
    assert role(*argv) is None


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--node-rank", "0", "--master-addr", "x"], {}, Serve("x", 29500, own=True)),
        (["--node-rank", "1", "--master-addr", "x"], {}, Join("x", 29500)),
        (["--node-rank=1", "--master-addr=x", "--master-port=8"], {}, Join("x", 8)),
        (["--node-rank", "1"], {}, Join("127.0.0.1", 29500)),
        (["--node-rank", "0", "--rdzv-endpoint", "x:8"], {}, Serve("x", 8, own=True)),
        (["--node-rank", "1", "--rdzv-endpoint", "me:8"], {}, Join("me", 8)),
        ([], {"MASTER_ADDR": "x", "MASTER_PORT": "8", "NODE_RANK": "0"}, Serve("x", 8, own=True)),
        ([], {"MASTER_ADDR": "x", "MASTER_PORT": "8", "NODE_RANK": "1"}, Join("x", 8)),
        ([], {"MASTER_ADDR": "x", "MASTER_PORT": "8", "RANK": "2"}, Join("x", 8)),
        ([], {"MASTER_ADDR": "x", "RANK": "0"}, Serve("x", 29500, own=True)),
        ([], {"MASTER_ADDR": "me"}, Serve("me", 29500, own=True, by_name=True)),
        ([], {"MASTER_ADDR": "x"}, Join("x", 29500)),
        # RANK is a worker's here, started by another launcher
        ([], {"MASTER_ADDR": "x", "RANK": "0", "LOCAL_RANK": "0"}, Join("x", 29500)),
        # what is typed counts more than what is inherited
        (["--rdzv-endpoint", "me:8"], {"MASTER_ADDR": "x", "RANK": "1"},
         Serve("me", 8, own=True, by_name=True)),
        (["--master-addr", "y"], {"MASTER_ADDR": "x", "NODE_RANK": "1"}, Join("y", 29500)),
    ],
)  # fmt: skip
def test_nodes_with_numbers(
    argv: list[str], environ: dict[str, str], expected: Serve | Join | None
) -> None:
    assert role("--nnodes", "2:4", *argv, **environ) == expected


def test_world_size_is_the_number_of_nodes_where_nothing_else_sets_the_size() -> None:
    job = {"MASTER_ADDR": "x", "MASTER_PORT": "8", "WORLD_SIZE": "3"}
    assert role(**job, RANK="0") == Serve("x", 8, own=True)
    assert role("--nproc-per-node", "2", **job, RANK="1") == Join("x", 8)
    assert role("-np", "2", **job, RANK="1") is None
    assert role("--standalone", **job, RANK="1") is None
    assert role(**{**job, "WORLD_SIZE": "1"}, RANK="0") is None
    assert role(**job, RANK="0", LOCAL_RANK="0") is None
    line = with_node_count(resolve(["x.py"], {}), {**job, "RANK": "1"})
    assert ("--nnodes", "3", "WORLD_SIZE") in line.origins()
    assert line.options.nnodes == (3, 3)


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--serve", "-H", "a"], {}, "--hosts names hosts, and with --serve they join"),
        (["--join", "x", "--standalone"], {}, "--standalone names hosts, and with --join"),
        (["--serve", "--join", "x"], {}, "--serve and --join contradict each other"),
        (["--nnodes", "2"], {"MASTER_ADDR": "x", "RANK": "one"}, "the variable RANK is 'one'"),
        (["--nnodes", "2"], {"MASTER_ADDR": "x", "MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
    ],
)
def test_contradictions(argv: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        role(*argv, **environ)


def test_a_node_that_joins_by_its_variables_says_which() -> None:
    job = {"MASTER_ADDR": "x", "MASTER_PORT": "8", "WORLD_SIZE": "2"}
    joined = role(**job, RANK="1")
    assert isinstance(joined, Join)
    assert joined.because == "RANK=1 MASTER_ADDR=x MASTER_PORT=8"
    given = role("--nnodes", "2", "--node-rank", "1", **job)
    assert isinstance(given, Join)
    assert given.because == ""


def test_the_last_port_of_a_range_is_taken_where_the_usual_one_is_not_in_it() -> None:
    assert role("--serve", "--ports", "29400-29463") == Serve("0.0.0.0", 29400, own=False)  # noqa: S104
    assert role("--serve", "--ports", "3000-3063") == Serve("0.0.0.0", 3063, own=False)  # noqa: S104
    assert role("--join", "other", "--ports", "3000-3063") == Join("other", 3063)
    assert role("--join", "other:7", "--ports", "3000-3063") == Join("other", 7)
    node = ("--nnodes", "2", "--node-rank", "1", "--ports", "3000-3063")
    assert role(*node) == Join("127.0.0.1", 3063)
    assert role(*node, MASTER_PORT="29") == Join("127.0.0.1", 29)
