"""What the driver asks of whatever brings an agent to life on a host.

The driver decides *that* an agent is to run (`core.decisions.StartAgent`); a backend (local, ssh,
a scheduler) decides *how*. The backends of `launcher.backends` implement `AgentStarter`; the
driver is given a `StarterFactory`, because the rendezvous' address is known only once its
server is up. No order travels this way: an agent that runs reads its orders from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

OnLost: TypeAlias = Callable[[str], None]
"""Told once, with a reason for people, that an agent is gone or never came up."""


class AgentStarter(Protocol):
    """Starts agents and knows when one of them ends.

    The driver's mailbox thread makes all calls; an implementation may call `on_lost` from any
    thread (the callback only puts an event into the driver's mailbox: it never blocks and
    never raises).
    """

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """Begin to start this host's agent, its n-th incarnation (1, 2, …); return at once.

        Args:
            host: the name as discovery gave it (validated by `runtime.host_lists`).
            incarnation: what the agent has to call itself; grows with each start on that host.
            on_lost: called exactly once when this agent's process has ended, for whatever
                reason (exit status 0 included), or could not be started at all. The reason
                names what happened and what to try ("ssh: connect to node3 timed out after
                10 s; check …"). After `close()` has returned it is not called any more.

        Whatever goes wrong is told through `on_lost` and never raised. That an agent is *up* is
        not reported here: it posts `AgentReady` itself. Two incarnations of one host may be
        under way at once for a moment; they are independent.
        """

    def kill(self, host: str, incarnation: int) -> None:
        """End one agent and everything it started, now and without asking it; return at once.

        The driver calls this for an agent that let its lease expire: it hangs, or is stopped or
        cut off, and must not go on beside its next incarnation. One that is already gone, or was
        never started, is none of the caller's mistakes: nothing happens. `on_lost` is told as
        always once the process has ended; where it cannot be reached at all (a dead host), once
        that is certain.
        """

    def close(self, grace: float) -> None:
        """End every agent that still runs, and everything it started; no `start` may follow.

        Agents were already told to shut down by an order where that was possible: wait up to
        `grace` seconds (0: not at all) for them to exit by themselves, then kill what is left.
        Returns within `grace` plus a few seconds in any case, leaves no process, thread or file
        behind, is idempotent, and may be called when nothing was ever started.
        """


StarterFactory: TypeAlias = Callable[[str, Path], AgentStarter]
"""`(endpoint, token_file) -> starter`: the rendezvous' URL `http://host:port`, and the path of
the 0600 file with the job's token on this machine. Called once, before the first start."""
