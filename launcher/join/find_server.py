"""The way from a node to the job's server: found by name, joined with a secret, within a deadline.

The server's name is looked up again for each attempt, because the server may come back elsewhere.
Agents get a numeric address, so that nothing is looked up later. Times are seconds.
"""

import socket
import time
from collections.abc import Callable

import msgspec

from elastic_driver.core.join_messages import NODES_PATH, Joined, NodeReport
from elastic_driver.errors import ClusterError, UsageError
from launcher.network import bracketed
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, RequestError, UnauthorizedError

ATTEMPT_S = 3.0  # the time for one address to answer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
decode_joined = msgspec.json.Decoder(Joined).decode


class JobServer:
    """The server of a job, as a node knows it.

    Args:
        host: its name or address.
        port: where it listens.
        secrets: returns what this node may show at this moment.
        say: shows a sentence to the user.
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

    def join(self, offer: NodeReport, patience: float, option: str) -> tuple[str, Joined]:
        """Wait until the server takes this node in; return its numeric URL and its answer.

        Raises ClusterError when it has not answered within `patience` seconds (`option` sets
        them), and UsageError where it refuses this node for good.
        """
        until = time.monotonic() + patience
        pause, said = FIRST_PAUSE_S, False
        while True:
            found = self._attempt(offer)
            if not isinstance(found, str):
                return found
            if time.monotonic() + pause > until:
                raise ClusterError(
                    f"no server at {self.place} within {patience:g} s ({option}): {found}; is it "
                    "started, and can this host reach that port?"
                )
            if not said:
                said = True
                self._say(f"waiting for the server at {self.place}, {patience:g} s at most")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _attempt(self, offer: NodeReport) -> tuple[str, Joined] | str:
        """Try every address of the server; return the problem where none takes this node in."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            return f"{self._host} has no address: {error.strerror}"
        problem = f"{self._host} has no address"
        for address in dict.fromkeys(str(entry[4][0]) for entry in found):
            url = f"http://{bracketed(address)}:{self._port}"
            try:
                socket.create_connection((address, self._port), ATTEMPT_S).close()
                return url, self._offer(url, offer)
            except TimeoutError:
                problem = f"{address} does not answer"
            except (OSError, RendezvousError, msgspec.DecodeError) as error:
                problem = getattr(error, "strerror", None) or str(error)
        return problem

    def _offer(self, url: str, offer: NodeReport) -> Joined:
        """Offer this node, with one secret after the other."""
        secrets = self._secrets()
        if not secrets:
            raise UsageError(
                f"the server at {self.place} is up, but nothing tells it that this node may join: "
                "give the same --run-id (--rdzv-id) on every node, or the same --token-file"
            )
        for secret in secrets:
            with RendezvousClient(url, secret, ATTEMPT_S) as client:
                try:
                    return decode_joined(client.post_json(NODES_PATH, msgspec.json.encode(offer)))
                except UnauthorizedError:
                    continue
                except RequestError as error:
                    if error.status == 409:
                        raise UsageError(str(error)) from None
                    raise ClusterError(
                        f"what answers at {self.place} takes in no nodes ({error.code}); start it "
                        "with --serve, or with --nnodes of more than 1 and --rdzv-endpoint"
                    ) from None
        raise UsageError(
            f"the server at {self.place} does not know this node's secret: it serves another job, "
            "or --run-id (--rdzv-id) or --token-file differ from the server's"
        )
