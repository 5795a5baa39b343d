"""Tells the agents of an earlier driver where their next driver is.

An agent looks for its driver at the address that it knows. A driver that goes on with the job on
another host is at another address, so it tells each agent of the job's books at the port where the
agent answers probes. An agent that does not answer is told again. Times are seconds.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from elastic_driver.announcement import announce
from elastic_driver.core.rules.fleet import HostAgent

AGAIN_S = 0.5


async def tell_agents(
    agents: Iterable[HostAgent], *, run_id: str, term: int, url: str, token: str, within: float
) -> None:
    """Tell these agents the URL of this driver; give up after `within` seconds."""

    async def tell(agent: HostAgent) -> None:
        place = agent.address, agent.probe_port
        seen = reachable_url(url, *place)
        while not await announce(*place, run_id=run_id, term=term, url=seen, token=token):
            await asyncio.sleep(AGAIN_S)

    known = [tell(agent) for agent in agents if agent.is_up and agent.probe_port]
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*known), within)


def reachable_url(url: str, address: str, port: int) -> str:
    """Return the URL as another host sees it: loopback becomes the address that leads there.

    The server's own URL names loopback where it listens at all addresses.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or "") or _is_loopback(address):
        return url
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:  # nothing is sent by `connect`
        unsent.connect((address, port))
        own = unsent.getsockname()[0]
    host = f"[{own}]" if ":" in own else own
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return False
