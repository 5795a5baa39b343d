"""Which backend starts the agents: this machine's own, ssh, or for each host the fitting one.

`--backend auto` takes the local backend for names of this machine and ssh for all others, so that
a list may hold both. What is asked for by name serves every host.
"""

from __future__ import annotations

import time
from pathlib import Path

from elastic_driver.runtime.hostlist import Hosts
from elastic_driver.runtime.starter import AgentStarter, OnLost, StarterFactory
from launcher.backends.local import LocalBackend
from launcher.backends.ssh import SshBackend
from launcher.backends.this_machine import is_this_machine
from launcher.network import Whereabouts


def remote_hosts(backend: str, hosts: Hosts) -> list[str]:
    """The hosts that agents are started on over ssh."""
    if backend == "local":
        return []
    return [
        host for host, slots in hosts if slots and (backend == "ssh" or not is_this_machine(host))
    ]


def make_starter_factory(backend: str, whereabouts: Whereabouts) -> StarterFactory:
    """What makes the driver's `AgentStarter`, once the rendezvous has an address."""

    def local(endpoint: str, token_file: Path) -> LocalBackend:
        return LocalBackend(endpoint, token_file, address=whereabouts.own_address)

    def ssh(endpoint: str, token_file: Path) -> SshBackend:
        def endpoint_for(host: str) -> str:
            return whereabouts.endpoint_for(endpoint, host)

        return SshBackend(endpoint_for, token_file, whereabouts.options)

    def either(endpoint: str, token_file: Path) -> AgentStarter:
        return EachHostsOwn(local(endpoint, token_file), ssh(endpoint, token_file))

    if backend == "local":
        return local
    return ssh if backend == "ssh" else either


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
