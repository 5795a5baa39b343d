"""Nodes that join by themselves as a job's hosts, in a plan. Pure; `launch` calls it."""

from __future__ import annotations

from msgspec import Struct

from elastic_driver.runtime.host_lists import Hosts
from launcher import options as o
from launcher.commandline.values import Values
from launcher.plan.role import Serve


class JoinedHosts(Struct, frozen=True):
    """Nodes that join by themselves, and the server's own one where it trains too."""

    host: str  # as the nodes know the server
    port: int
    own: Hosts
    default_slots: int  # of a node that does not say
    token_file: str | None = None
    run_id: str | None = None  # as given: whoever knows it may join, where there is no token file

    @property
    def note(self) -> str:
        """What whoever starts the server should know about who may join."""
        if self.token_file is not None:
            return ""
        if self.run_id is not None:
            return (
                f"whoever knows the run id {self.run_id} and reaches port {self.port} can join "
                "this job; give --token-file on every node for a real secret"
            )
        return (
            "nodes can join only with this run's token, from a shared --state-dir; give the same "
            "--run-id (--rdzv-id) or --token-file on every node otherwise"
        )

    def describe(self) -> str:
        """The hosts in words."""
        own = "".join(f"{host}:{slots} (this node), and " for host, slots in self.own)
        return f"{own}nodes that join {self.host}:{self.port}"


def joined_hosts(values: Values, name: str, role: Serve, slots: int | None) -> JoinedHosts:
    """The hosts of a job that this node, called `name`, serves."""
    return JoinedHosts(
        host=role.host,
        port=role.port,
        own=((name, slots or 1),) if role.own else (),
        default_slots=slots or 1,
        token_file=values[o.TOKEN_FILE],
        run_id=values[o.RUN_ID],
    )


def joining_note(hosts: object) -> str:
    """What whoever starts such a job should know; empty for any other source of hosts."""
    return hosts.note if isinstance(hosts, JoinedHosts) else ""
