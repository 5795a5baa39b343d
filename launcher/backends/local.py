"""Agents on this machine: each is a child of the driver's process.

Several names of this machine (localhost, 127.0.0.2, its own name) are separate hosts, each with an
agent of its own. An agent's stdin is a pipe whose other end only this process holds: when the
driver dies, even by SIGKILL, the agents see it close. This process is a child subreaper: processes
that a killed agent leaves behind become its children and are ended here. An agent that an earlier
driver has started is no child; `launcher.backends.adopted` watches and ends it.

One asyncio loop on one thread, started with the first agent, runs them all (`local_agents`). Times
are seconds.
"""

import asyncio
import shlex
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_driver import contract
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import Backend, BackendJob, OnLost
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.words.orders import JobSpec, decode
from launcher.agent import processes
from launcher.backends.addresses import is_this_machine, meeting_address, own_address
from launcher.backends.base import AgentPlan, agent_arguments
from launcher.backends.local_agents import AGENT, LocalAgent, LocalAgents
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient

SPEC_S = 5.0  # for the rendezvous to return the job's specification, which is there already


class LocalBackend(Backend):
    """Starts agents as children of this process.

    Args:
        endpoint: the rendezvous' URL.
        token_file: the driver's token, of which each agent derives its own. Its path also marks the
            processes of this job. An agent removes it and the endpoint file beside it when this
            process dies without doing that.
        address: the address at which other machines reach this one; None: they need not.
        several: there will be agents of more than one host.
        grows: more hosts may come at any time; implies `several`.
        resumable: another driver may go on with the job, and needs its files.
    """

    def __init__(
        self,
        endpoint: str,
        token_file: Path,
        *,
        address: str | None = None,
        several: bool = False,
        grows: bool = False,
        resumable: bool = False,
    ) -> None:
        self._endpoint, self._address = endpoint, address
        self._resumable = ("--resumable",) if resumable else ()
        self._token_file = token_file.absolute()
        self._env = {contract.JOB_MARK: str(self._token_file)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._agents = LocalAgents(self._env, self._read_spec, several=several, grows=grows)

    def plan(self, host: str, incarnation: int) -> AgentPlan:
        """Return what `start` executes; raises ClusterError for another machine's name."""
        if not is_this_machine(host):
            raise ClusterError(
                f"{host} is not this machine, and the local backend starts nothing elsewhere; "
                "name localhost, or choose another --backend"
            )
        token_file = str(self._token_file)
        argv = (
            *(*AGENT, *agent_arguments(self._endpoint, host, incarnation)),
            *("--token-file", token_file, "--address", self._address or meeting_address(host)),
            *("--lifeline", "--orphan-file", token_file),
            *("--orphan-file", str(self._token_file.with_name("endpoint.json"))),
            *self._resumable,
        )
        return AgentPlan(host, incarnation, argv, self._env)

    # ---- Backend -------------------------------------------------------------------------

    def describe(self, host: str) -> str:
        """See `Backend.describe`."""
        return shlex.join(self.plan(host, 1).argv)

    def check(self, hosts: Hosts) -> None:
        """See `Backend.check`: another machine would be tried over and over, in vain."""
        for host, slots in hosts:
            if slots and not is_this_machine(host):
                raise UsageError(
                    f"{host} is not this machine, and --backend local starts nothing elsewhere; "
                    "name localhost, or leave the host out"
                )

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        try:
            agent = LocalAgent(self.plan(host, incarnation), on_lost)
        except ClusterError as error:
            on_lost(str(error))
            return
        self._call(partial(self._agents.begin, agent))

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        """See `AdoptsAgents.adopt`; if its process is not here, its heartbeats say if it lives."""
        if (agent := self._agents.of_earlier(host, incarnation, pid, on_lost)) is not None:
            self._call(partial(self._agents.adopt, agent))

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`; an agent that an earlier driver has started is looked for."""
        self._call(partial(self._agents.kill, (host, incarnation)))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function on the loop, which the first call starts."""
        if self._loop is None:
            processes.become_subreaper()
            self._loop = asyncio.new_event_loop()
            run = self._loop.run_forever
            self._thread = threading.Thread(target=run, name="local-agents", daemon=True)
            self._thread.start()
            self._loop.call_soon_threadsafe(self._agents.reap_strangers)
        self._loop.call_soon_threadsafe(function)

    def close(self, grace: float) -> None:
        """See `Backend.close`."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        self._agents.abort()  # the loop may wait for a warm parent that is stopped
        asyncio.run_coroutine_threadsafe(self._agents.close(max(grace, 0.0)), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
        processes.become_subreaper(False)

    def _read_spec(self, incarnation: int) -> JobSpec:
        token, known_by = read_credentials(self._token_file)
        with RendezvousClient(self._endpoint, token, SPEC_S, fingerprint=known_by) as client:
            entry = client.get(contract.spec_key(incarnation))
        if entry is None:
            raise ClusterError("the rendezvous does not have the job's specification")
        return decode(JobSpec, entry.value)


def make_backend(job: BackendJob) -> LocalBackend:
    """Return the backend that is registered as `local`."""
    named = {host for host, slots in job.hosts if slots}
    here = {host for host in named if is_this_machine(host)}
    return LocalBackend(
        job.endpoint,
        job.token_file,
        address=own_address(job.bind_host),
        several=len(here) > 1,
        # Hosts that come are names of this machine if all known ones are.
        grows=job.grows and here == named,
        resumable=job.resumable,
    )
