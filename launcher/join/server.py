"""The way from a node to the job's server: found by name, joined with a secret, never for ever.

Used by `launcher.join.node`, on its loop. Looks the server's name up anew for each attempt (it
may come back elsewhere), and gives agents a numeric address, so that nothing is looked up later.
Times are seconds.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from elastic_driver.core.join_messages import JOIN_PATH, Joined, JoinRequest
from elastic_driver.errors import ClusterError, UsageError
from launcher.network import bracketed
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, RequestError, UnauthorizedError

ATTEMPT_S = 3.0  # for one address to answer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
_decode_joined = msgspec.json.Decoder(Joined).decode


@dataclass(frozen=True)
class Membership:
    """A node that was taken in, and what it speaks with."""

    joined: Joined
    url: str  # with a numeric address
    client: RendezvousClient  # with the job's token


class WrongSecretError(UsageError):
    """The server knows none of the secrets that this node has."""


class Server:
    """One server as a node sees it.

    Args:
        host: its name or address.
        port: where it listens.
        secrets: what this node may show at this moment.
        say: tells people a sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secrets: Callable[[], tuple[str, ...]],
        say: Callable[[str], None],
    ) -> None:
        self._host, self._port, self._secrets, self._say = host, port, secrets, say
        self.place = f"{bracketed(host)}:{port}"

    async def join(self, wish: JoinRequest, patience: float, option: str) -> Membership:
        """Wait until the server takes this node in.

        Raises ClusterError when it has not answered within `patience` seconds (`option` says so),
        UsageError where it refuses us for good.
        """
        until = time.monotonic() + patience
        pause, told = FIRST_PAUSE_S, False
        while True:
            problem = await self._knock(wish)
            if isinstance(problem, Membership):
                return problem
            if time.monotonic() + pause > until:
                raise ClusterError(
                    f"no server at {self.place} within {patience:g} s ({option}): {problem}; is it "
                    "started, and can this host reach that port?"
                )
            if not told:
                told = True
                self._say(f"waiting for the server at {self.place}, {patience:g} s at most")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _knock(self, wish: JoinRequest) -> Membership | str:
        """One attempt with every address and secret; why it failed."""
        try:
            addresses = await self._addresses()
        except OSError as error:
            return f"{self._host} has no address: {error.strerror}"
        problem = "it has no address"
        for address in addresses:
            try:
                _, writer = await asyncio.wait_for(
                    asyncio.open_connection(address, self._port), ATTEMPT_S
                )
                writer.close()
            except asyncio.TimeoutError:
                problem = f"{address} does not answer"
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                answer = await self._ask(f"http://{bracketed(address)}:{self._port}", wish)
                if isinstance(answer, Membership):
                    return answer
                problem = answer
        return problem

    async def _addresses(self) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _ask(self, url: str, wish: JoinRequest) -> Membership | str:
        """Show our secrets, one after the other."""
        secrets = await asyncio.to_thread(self._secrets)
        if not secrets:
            raise UsageError(
                f"the server at {self.place} is up, but nothing tells it that this node may join: "
                "give the same --run-id (--rdzv-id) on every node, or the same --token-file"
            )
        for secret in secrets:
            client = RendezvousClient(url, secret, ATTEMPT_S)
            try:
                body = await asyncio.to_thread(
                    client.post_json, JOIN_PATH, msgspec.json.encode(wish)
                )
                joined = _decode_joined(body)
            except UnauthorizedError:
                continue
            except RequestError as error:
                raise self._refused(error) from None
            except (RendezvousError, msgspec.DecodeError) as error:
                return str(error)
            finally:
                client.abort()
            return Membership(joined, url, RendezvousClient(url, joined.token))
        raise WrongSecretError(
            f"the server at {self.place} does not know this node's secret: it serves another job, "
            "or --run-id (--rdzv-id) or --token-file differ from the server's"
        )

    def _refused(self, error: RequestError) -> ClusterError | UsageError:
        if error.status == 409:
            return UsageError(str(error))
        return ClusterError(
            f"what answers at {self.place} takes in no nodes ({error.code}); start it with "
            "--serve, or with --nnodes of more than 1 and --rdzv-endpoint"
        )
