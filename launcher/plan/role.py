"""What this node is in a job whose nodes start by themselves: it serves, joins, or neither.

Pure: what has to be known of this machine is asked through `Look`. The spellings are our own
(--serve, --join), and torchrun's: the same command with --rdzv-endpoint on every node, or
--node-rank, --master-addr and --master-port, or the variables that say the same (Kubeflow's
PyTorchJob sets them, with WORLD_SIZE as the number of nodes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastic_driver.errors import UsageError
from launcher import options as o
from launcher.commandline.values import Setting, Values
from launcher.options import Option

RENDEZVOUS_PORT = 29400  # torchrun's default, and ours for --serve and --join
MASTER_PORT = 29500  # torch's default for MASTER_PORT
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what a user may name, nothing is bound here


@dataclass(frozen=True)
class Serve:
    """Hold the job at this address; `own`: workers run on this node too."""

    host: str
    port: int
    own: bool
    by_name: bool = False  # chosen because HOST is this machine: another process may be quicker


@dataclass(frozen=True)
class Join:
    """Join the job that is served there."""

    host: str
    port: int


Role: TypeAlias = Serve | Join | None


@dataclass(frozen=True)
class Look:
    """What is asked of this machine."""

    is_here: Callable[[str], bool]  # whether a host's name or address is this machine's
    can_bind: Callable[[str, int], bool]  # whether nobody listens at this port of it yet


def decide_role(values: Values, environ: Mapping[str, str], look: Look) -> Role:
    """The node's role; None: a job whose hosts, if any, are started from here.

    Raises UsageError where options contradict each other, or a variable makes no sense.
    """
    hosts = _named_hosts(values)
    if values[o.SERVE] or values[o.JOIN_AT] is not None:
        return _said(values, hosts)
    nodes = values[o.NNODES]
    if hosts or nodes is None or nodes[1] == 1:
        return None
    rank = values[o.NODE_RANK]
    if values.level(o.RDZV_ENDPOINT):
        host, port = values[o.RDZV_ENDPOINT]
        port = port or RENDEZVOUS_PORT
    else:
        rank = _rank(environ) if rank is None else rank
        found = _master(values, environ, rank)
        if found is None:
            return None
        host, port = found
    if rank is not None:
        return Serve(host, port, own=True) if rank == 0 else Join(host, port)
    if host in ANYWHERE or (look.is_here(host) and look.can_bind(host, port)):
        return Serve(host, port, own=True, by_name=host not in ANYWHERE)
    return Join(host, port)


def with_node_count(values: Values, environ: Mapping[str, str]) -> Values:
    """The values with --nnodes as the environment says it, where nobody else sets the size.

    Only where all that PyTorchJob sets is there, and this is no worker of another launcher.
    """
    sizes: tuple[Option[Any], ...] = (o.NNODES, o.NUM_PROC, o.MIN_NP, o.MAX_NP, o.STANDALONE)
    complete = "MASTER_ADDR" in environ and "WORLD_SIZE" in environ
    if not complete or any(map(values.level, sizes)) or _rank(environ) is None:
        return values
    if values[o.SERVE] or values[o.JOIN_AT] is not None or _named_hosts(values):
        return values
    nodes = _number(environ, "WORLD_SIZE")
    if nodes < 2:
        return values
    return values.replaced(o.NNODES, Setting((nodes, nodes), "WORLD_SIZE", 2))


def _said(values: Values, hosts: list[Option[Any]]) -> Role:
    if hosts:
        one = "--serve" if values[o.SERVE] else "--join"
        raise UsageError(f"{hosts[0].long} names hosts, and with {one} they join by themselves")
    place = values[o.JOIN_AT]
    if place is None:
        given = values.level(o.RDZV_ENDPOINT) > 0
        host, port = values[o.RDZV_ENDPOINT] if given else (ANYWHERE[0], 0)
        return Serve(host, port if given and port else RENDEZVOUS_PORT, own=False)
    if values[o.SERVE]:
        raise UsageError("--serve and --join contradict each other; run them one beside the other")
    return Join(place[0], place[1] or RENDEZVOUS_PORT)


def _named_hosts(values: Values) -> list[Option[Any]]:
    kinds: tuple[Option[Any], ...] = (
        o.STANDALONE,
        o.HOST_DISCOVERY_SCRIPT,
        o.HOSTS_LIST,
        o.HOSTFILE,
    )
    return [option for option in kinds if values[option]]


def _master(values: Values, environ: Mapping[str, str], rank: int | None) -> tuple[str, int] | None:
    """Where node 0 serves; None where nothing speaks of a node 0."""
    host = values[o.MASTER_ADDR] or environ.get("MASTER_ADDR")
    if host is None:
        if values[o.NODE_RANK] is None or rank is None:
            return None
        host = "127.0.0.1"
    port = values[o.MASTER_PORT]
    if port is None:
        port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else MASTER_PORT
    return host.strip("[]"), port


def _rank(environ: Mapping[str, str]) -> int | None:
    """This node's number; RANK is a worker's where there is a LOCAL_RANK beside it."""
    if "NODE_RANK" in environ:
        return _number(environ, "NODE_RANK")
    if "RANK" in environ and "LOCAL_RANK" not in environ:
        return _number(environ, "RANK")
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise UsageError(f"the variable {name} is {text[:40]!r}, and should be a whole number")
    return int(text)
