"""What a node that joins by itself says to the driver, and what it is told.

Sent by `launcher.join.node` to the routes of `runtime.joined`, each a POST with one of
these as its body and its answer. Pure data (JSON by msgspec), bounded where it comes over the
wire. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

JOIN_PATH = "/v1/nodes:join"
ATTEND_PATH = "/v1/nodes:attend"
LEAVE_PATH = "/v1/nodes:leave"

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Token = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=2000)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A node offers itself.

    `machine` tells machines of one name apart; `session` is random, one for each start of the
    node's process; `slots` None: as many as the server says.
    """

    name: Name
    machine: Token
    session: Token
    version: Token  # of elastic-driver there
    slots: Annotated[int, Meta(ge=1, le=65536)] | None = None


class Joined(Struct, frozen=True):
    """The node is taken: what the job calls it, and what its agents need."""

    name: str
    run_id: str
    token: str  # the job's own; whoever may join may know it
    heartbeat_timeout: float
    leave_notice: float  # how long leaving in good order may take


class AgentEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the node's agents has ended, for this reason."""

    incarnation: Number
    reason: Text


class AttendRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The node lives, knows the orders up to `known`, and waits for newer ones."""

    session: Token
    known: Number = 0
    ended: Annotated[tuple[AgentEnd, ...], Meta(max_length=1000)] = ()
    wait: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class JobOver(Struct, frozen=True):
    """The job has ended with this exit status."""

    exit_code: int
    reason: str


class NodeOrders(Struct, frozen=True):
    """What is to be so on the node: agents to run, and the end of it all."""

    number: int  # grows with every change
    started: tuple[int, ...] = ()  # incarnations whose agents are to run, unless they ended
    killed: tuple[int, ...] = ()  # of these: to be killed at once
    over: JobOver | None = None


class LeaveRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The node goes; its agents have ended."""

    session: Token
    reason: Text
