"""The default backend: local for the names of this machine, ssh for all other hosts."""

import time

from elastic_driver.runtime.backend import Backend, BackendJob, OnClosed, OnLost
from elastic_driver.runtime.discovery import Hosts
from launcher.backends.local import LocalBackend
from launcher.backends.local import make_backend as make_local
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.shells import make_ssh
from launcher.network import is_this_machine


class AutoBackend(Backend):
    """The backend that is registered as `auto`."""

    def __init__(self, job: BackendJob) -> None:
        self._here = make_local(job)
        self._elsewhere = make_ssh(job)
        self._chosen: dict[tuple[str, int], LocalBackend | RemoteBackend] = {}

    def _for(self, host: str) -> LocalBackend | RemoteBackend:
        return self._here if is_this_machine(host) else self._elsewhere

    def report_connections(self, on_closed: OnClosed) -> None:
        """See `ReportsConnections.report_connections`."""
        self._elsewhere.report_connections(on_closed)

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        backend = self._chosen[host, incarnation] = self._for(host)
        backend.start(host, incarnation, on_lost)

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        """See `AdoptsAgents.adopt`."""
        backend = self._chosen[host, incarnation] = self._for(host)
        backend.adopt(host, incarnation, pid, on_lost)

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; an agent that an earlier driver has started may be unknown."""
        backend = self._chosen.get((host, incarnation)) or self._for(host)
        backend.kill(host, incarnation)

    def close(self, grace: float) -> None:
        """See `Backend.close`; the grace is spent once."""
        began = time.monotonic()
        self._elsewhere.close(grace)
        self._here.close(max(0.0, grace - (time.monotonic() - began)))

    def describe(self, host: str) -> str:
        """See `Backend.describe`."""
        return self._for(host).describe(host)

    def check(self, hosts: Hosts) -> None:
        """See `Backend.check`; ssh is needed once a host is another machine."""
        if others := tuple(entry for entry in hosts if not is_this_machine(entry[0])):
            self._elsewhere.check(others)

    def find_problems(self, hosts: Hosts) -> dict[str, str]:
        """See `Backend.find_problems`."""
        others = tuple(entry for entry in hosts if not is_this_machine(entry[0]))
        return self._elsewhere.find_problems(others)

    def probe_address(self, host: str) -> tuple[str, int] | None:
        """See `Backend.probe_address`."""
        return self._for(host).probe_address(host)

    def look_up(self, host: str) -> str:
        """See `Backend.look_up`."""
        return self._elsewhere.look_up(host)
