"""The role of this node in a job whose nodes start by themselves: it serves, joins, or neither.

Pure: questions to this machine go through `Look`. The spellings are our own (--serve, --join) and
torchrun's: the same command with --rdzv-endpoint on every node; or --node-rank, --master-addr and
--master-port; or the variables that say the same (Kubeflow's PyTorchJob sets them, with WORLD_SIZE
as the number of nodes).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastic_driver.errors import UsageError
from launcher.options import table as o
from launcher.options.record import Option
from launcher.options.values import OptionValues, Setting

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


_HOST_OPTIONS: tuple[Option[Any], ...] = (
    o.STANDALONE,
    o.HOST_DISCOVERY,
    o.HOST_DISCOVERY_SCRIPT,
    o.HOSTS_LIST,
    o.HOSTFILE,
)

Role: TypeAlias = Serve | Join | None


@dataclass(frozen=True)
class Look:
    """Questions to this machine."""

    is_here: Callable[[str], bool]  # whether a host's name or address is this machine's
    can_bind: Callable[[str, int], bool]  # whether nobody listens at this port of it yet


def decide_role(values: OptionValues, environ: Mapping[str, str], look: Look) -> Role:
    """Return the node's role; None: a job whose hosts, if any, are started from here.

    Raises UsageError if options contradict each other, or a variable makes no sense.
    """
    hosts = host_options(values)
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


def with_node_count(values: OptionValues, environ: Mapping[str, str]) -> OptionValues:
    """Return the values with --nnodes from the environment if nobody else sets the size.

    Only if all that PyTorchJob sets is there, and this is no worker of another launcher.
    """
    sizes: tuple[Option[Any], ...] = (o.NNODES, o.NUM_PROC, o.MIN_NP, o.MAX_NP, o.STANDALONE)
    complete = "MASTER_ADDR" in environ and "WORLD_SIZE" in environ
    if not complete or any(map(values.level, sizes)) or _rank(environ) is None:
        return values
    if values[o.SERVE] or values[o.JOIN_AT] is not None or host_options(values):
        return values
    nodes = _number(environ, "WORLD_SIZE")
    if nodes < 2:
        return values
    return values.replaced(o.NNODES, Setting((nodes, nodes), "WORLD_SIZE", 2))


def _said(values: OptionValues, hosts: list[Option[Any]]) -> Role:
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


def host_options(values: OptionValues) -> list[Option[Any]]:
    """Return the options that are given and say where to run."""
    return [option for option in _HOST_OPTIONS if values[option]]


def _master(
    values: OptionValues, environ: Mapping[str, str], rank: int | None
) -> tuple[str, int] | None:
    """Return where node 0 serves; None if nothing mentions a node 0."""
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
    """Return this node's number; RANK is a worker's if there is a LOCAL_RANK beside it."""
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
