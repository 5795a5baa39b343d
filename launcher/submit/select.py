"""Which backend starts the agents: this machine's own, one that reaches others, or both.

`--backend auto` takes the local backend for names of this machine and ssh for all others, so that
a list may hold both. What is asked for by name (ssh, slurm, mpi) serves every host.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from elastic_driver.runtime.backend import AgentStarter, OnLost, StarterFactory
from elastic_driver.runtime.host_lists import Hosts
from launcher.backends.local import LocalBackend
from launcher.backends.mpi import MpirunReach
from launcher.backends.remote import RemoteBackend
from launcher.backends.remote_shell import Reach
from launcher.backends.slurm import SrunReach
from launcher.backends.ssh import SshOptions, SshReach, alive_interval
from launcher.backends.this_machine import is_this_machine
from launcher.plan.launch import LaunchPlan
from launcher.submit.bind_address import Whereabouts


def remote_hosts(backend: str, hosts: Hosts) -> list[str]:
    """The hosts that agents are started on through another program."""
    if backend == "local":
        return []
    return [
        host for host, slots in hosts if slots and (backend != "auto" or not is_this_machine(host))
    ]


def make_reach(plan: LaunchPlan) -> Reach:
    """How hosts other than this machine are reached; raises UsageError where that cannot be."""
    if plan.backend == "slurm" and plan.allocation is not None:
        return SrunReach(plan.allocation.job_id, os.environ)
    ssh = SshOptions(
        port=plan.ssh_port,
        identity_file=plan.ssh_identity_file,
        alive_interval=alive_interval(plan.settings.heartbeat_timeout),
    )
    return MpirunReach(ssh, os.environ) if plan.backend == "mpi" else SshReach(ssh)


def make_starter_factory(
    backend: str, whereabouts: Whereabouts, hosts: Hosts = (), *, grows: bool = False
) -> StarterFactory:
    """What makes the driver's `AgentStarter`, once the rendezvous has an address.

    `hosts`: those that are known of already; more may come. `grows`: more are likely to.
    """
    named = {host for host, slots in hosts if slots}
    here = {host for host in named if is_this_machine(host)}

    def local(endpoint: str, token_file: Path) -> LocalBackend:
        own = whereabouts.own_address
        several = len(here) > 1
        # Hosts that come are this machine's where none has been another's.
        more = grows and here == named
        return LocalBackend(endpoint, token_file, address=own, several=several, grows=more)

    def remote(endpoint: str, token_file: Path) -> RemoteBackend:
        def endpoint_for(host: str) -> str:
            return whereabouts.endpoint_for(endpoint, host)

        return RemoteBackend(endpoint_for, token_file, whereabouts.reach)

    def either(endpoint: str, token_file: Path) -> AgentStarter:
        return EachHostsOwn(local(endpoint, token_file), remote(endpoint, token_file))

    if backend == "local":
        return local
    return either if backend == "auto" else remote


class EachHostsOwn:
    """Two starters as one: this machine's names go to the first, all others to the second."""

    def __init__(self, here: AgentStarter, elsewhere: AgentStarter) -> None:
        self._here, self._elsewhere = here, elsewhere
        self._chosen: dict[tuple[str, int], AgentStarter] = {}

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `AgentStarter.start`."""
        starter = self._here if is_this_machine(host) else self._elsewhere
        self._chosen[host, incarnation] = starter
        starter.start(host, incarnation, on_lost)

    def kill(self, host: str, incarnation: int) -> None:
        """See `AgentStarter.kill`."""
        if (starter := self._chosen.get((host, incarnation))) is not None:
            starter.kill(host, incarnation)

    def close(self, grace: float) -> None:
        """See `AgentStarter.close`; the grace is spent once."""
        began = time.monotonic()
        self._elsewhere.close(grace)
        self._here.close(max(0.0, grace - (time.monotonic() - began)))
