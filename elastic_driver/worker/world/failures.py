"""Which exceptions mean that the world broke, and which are the script's own.

`run` asks for every exception that leaves the training function. NCCL and the stores raise
`DistError`s; gloo raises plain RuntimeErrors, which are told by their text, in the same way
in which the agent tells whether a process that ended was a victim. Whatever is not recognised
is the script's and propagates untouched.
"""

from __future__ import annotations

import traceback

from torch.distributed import DistError

from elastic_driver.errors import WorldBrokenError
from elastic_driver.peer_loss import looks_like_peer_loss
from elastic_driver.worker.world.attempts import RoundOverError
from rendezvous.errors import SealedError

# Gloo's transport also reports that ranks disagree about a tensor's size: the script's mistake.
_DISAGREEMENT = "op.preamble"


def broke_the_world(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a collective that lost a peer or a link."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _is_broken_collective(link):
            return True
        link = link.__cause__
    return False


def _is_broken_collective(error: BaseException) -> bool:
    if isinstance(error, WorldBrokenError | DistError | RoundOverError | SealedError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return looks_like_peer_loss(message) and _DISAGREEMENT not in message


def describe(error: BaseException) -> str:
    """One line for the event log."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def let_go_of_frames(error: BaseException) -> None:
    """Clear the frames an exception holds: wrappers, loaders and their processes end now.

    Frames still running keep their variables.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        pending += [link.__cause__, link.__context__]
