"""Messages and store keys between the driver and nodes that join by themselves.

A node and the driver first prove to each other that both know the secret (`rendezvous.auth`):
`POST HELLO_PATH` with a `Hello` is answered with a `HelloAnswer`, `POST PROOF_PATH` with a
`NodeProof` is answered with `Joined`. From then on the node has a token of its own. It reports with
`POST NODES_PATH`, and is a client of the ordinary store: it renews `node_lease` and waits for
`node_order` to change. Pure data (JSON by msgspec) with bounds. Times are seconds.
"""

from typing import Annotated

from msgspec import Meta, Struct

NODES_PATH = "/v1/nodes"
HELLO_PATH, PROOF_PATH = f"{NODES_PATH}/hello", f"{NODES_PATH}/proof"
MAX_STRANGERS_BYTES = 16384  # of a hello and of a proof
NOT_JOINED = "not_joined"  # the error for a report of a node that the driver does not know

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Token = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^/]*\Z")]
Text = Annotated[str, Meta(max_length=2000)]
Hex256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # a nonce, or a proof


class NodeReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A node's report: it is there, its agent has ended, or it leaves.

    `machine` tells machines of one name apart. `session` is random and new each time a node joins.
    `slots` None: the server's default. `ended` is the incarnation of an agent that has ended, for
    this `reason`; 0: none has. With `leaves` the node leaves, for this `reason`. `joined_as` is its
    name in the job of a driver that has died, whose agents it still runs; None: it comes anew.
    """

    name: Name
    machine: Token
    session: Token
    version: Token  # of elastic-driver on the node
    slots: Annotated[int, Meta(ge=1, le=65536)] | None = None
    ended: Annotated[int, Meta(ge=0, le=2**53)] = 0
    leaves: bool = False
    reason: Text = ""
    joined_as: Name | None = None


class Hello(Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a node, which says nothing about it yet."""

    nonce: Hex256


class HelloAnswer(Struct, frozen=True):
    """The server's nonce, and one proof for each secret that it takes."""

    nonce: Hex256
    proofs: Annotated[tuple[Hex256, ...], Meta(max_length=8)]


class NodeProof(Struct, frozen=True, forbid_unknown_fields=True):
    """The node's proof in the exchange that has this nonce of the server, and its first report."""

    nonce: Hex256
    proof: Hex256
    report: NodeReport


class Joined(Struct, frozen=True):
    """The driver's answer to a report: the node's name in the job, and data for its agents."""

    name: Name
    run_id: str
    token: str  # of the node
    agent_token: str  # of agents of this name
    known_by: str  # how clients know the server's certificate; "": it has none
    heartbeat_timeout: float


class JobOver(Struct, frozen=True):
    """The end of the job, with its exit status."""

    exit_code: int
    reason: str


class NodeOrder(Struct, frozen=True):
    """The value of `node_order`: the agents that the driver wants on the node."""

    incarnation: int = 0  # to run as soon as the one before it has ended; 0: none
    killed: int = 0  # this incarnation, and all before it, end at once
    over: JobOver | None = None  # the node ends everything and leaves
    check: int = 0  # as `incarnation`, of a node check's agent, which runs beside the job's
    check_killed: int = 0


def node_lease(name: str, session: str) -> str:
    """Return the key of the lease that a node renews while it lives."""
    return f"nodes/{name}/{session}/lease"


def node_order(name: str, session: str) -> str:
    """Return the key of the node's `NodeOrder`."""
    return f"nodes/{name}/{session}/order"


def session_of(lease: str) -> str:
    """Return the session of a node's lease; "" if the key is none."""
    match lease.split("/"):
        case ["nodes", _name, session, "lease"]:
            return session
    return ""
