"""Tells the agents of an earlier driver where their next driver is.

An agent looks for its driver at the address that it knows. A driver that goes on with the job may
be at another one: on another host, or because another program holds the port. So it tells each
agent of the job's books at the port where the agent answers probes. An agent that does not answer
is told again. Times are seconds.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from elastic_driver.announcement import announce
from elastic_driver.job.fleet import HostAgent
from elastic_driver.job.job import Job
from elastic_driver.presence import Presence
from elastic_driver.reachability import reachable_url
from rendezvous.auth import agent_token

AGAIN_S = 0.5


def all_hear(job: Job) -> bool:
    """Return whether each agent that is up can be called, as far as the job knows.

    One whose probe port this machine does not reach goes on looking at the address that it knows.
    """
    agents, unreached = job.fleet.agents.values(), job.suspicion.unreached
    return all(a.probe_port and a.host not in unreached for a in agents if a.is_up)


async def tell_agents(
    agents: Iterable[HostAgent], *, run_id: str, term: int, url: str, token: str, within: float
) -> None:
    """Tell these agents the URL of this driver; give up after `within` seconds.

    `token` is the driver's. Workers cannot speak in its name: they do not know their agent's token.
    """

    async def tell(agent: HostAgent) -> None:
        place = agent.address, agent.probe_port
        presence = Presence(agent_token(token, agent.host), agent.host, agent.incarnation)
        seen = reachable_url(url, *place)
        while not await announce(*place, presence, run_id=run_id, term=term, url=seen):
            await asyncio.sleep(AGAIN_S)

    async def tell_all() -> None:  # a task: it takes note of its end, also where that is cut short
        known = [tell(agent) for agent in agents if agent.is_up and agent.probe_port]
        await asyncio.gather(*known)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(tell_all(), within)
