"""Short connections that show whether a process, or only its machine, can be reached.

The driver probes agents this way, and an agent that gets no answer probes the driver. The result
comes from several attempts, because the kernel sends a lost SYN again only after a second. Runs on
an asyncio loop; times are seconds.
"""

import asyncio
import contextlib
import ipaddress
import socket
from typing import Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from elastic_driver.presence import Asked

ATTEMPTS = 4
# "refused": the machine says that no process listens there, or another program answers; "silent":
# there was no clear answer.
Result: TypeAlias = Literal["answered", "refused", "silent"]


async def probe(address: str, port: int, patience: float, asked: Asked | None = None) -> Result:
    """Return the first clear answer of several attempts within `patience` seconds.

    With `asked`, the process has to answer that question: a stopped one accepts connections too, as
    its kernel does that, and so does whoever has the port by now. The attempts begin one after the
    other and go on side by side. If this process is stopped meanwhile, one attempt loses its time
    and the others still have theirs.
    """
    attempts = set[asyncio.Task[Result | None]]()
    try:
        for _ in range(ATTEMPTS):
            attempts.add(asyncio.create_task(_attempt(address, port, asked)))
            pause = asyncio.create_task(asyncio.sleep(patience / ATTEMPTS, None))
            waiting: set[asyncio.Task[Result | None]] = {pause, *attempts}
            while pause in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for result in (task.result() for task in done):
                    if result is not None:
                        pause.cancel()
                        return result
            attempts = waiting
        return "silent"
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _attempt(address: str, port: int, asked: Asked | None) -> Result | None:
    """Connect, ask and read the answer; return None if that proves nothing."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (address, port))
        except ConnectionRefusedError:
            return "refused"
        if asked is None:
            return "answered"
        await loop.sock_sendall(connection, asked.question)
        found = b""
        while asked.answer.startswith(found) and found != asked.answer:
            if not (more := await loop.sock_recv(connection, len(asked.answer))):
                return None  # cut off, perhaps before the answer was there
            found += more
        return "answered" if found == asked.answer else "refused"
    return None


def reachable_url(url: str, address: str, port: int) -> str:
    """Return the URL as another host sees it: loopback becomes the address that leads there.

    The server's own URL names loopback where it listens at all addresses.
    """
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or "") or is_loopback(address):
        return url
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:  # nothing is sent by `connect`
        unsent.connect((address, port))
        own = unsent.getsockname()[0]
    host = f"[{own}]" if ":" in own else own
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def is_loopback(host: str) -> bool:
    """Return whether this is a numeric address of loopback; a name is not."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return False
