"""Whether all ranks do the same: three numbers of which the maximum is taken.

Buckets have the sizes that a rank gives them. Were a layer unfrozen on one rank only, gloo would
wait for bytes that never come, or add those of other parameters. So each rank *proposes* what it is
going to exchange, as a number made from all of it, in a message that has the same size on all
ranks. Where the proposals differ, or a rank has something to refuse, all ranks tell each other why,
and all raise the same error.

Everything here is collective, in torch's default group: bounded texts, never pickles.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.torch_seams import process_groups

MOST_BYTES = 1 << 22  # of one rank's text


class Agreement:
    """The proposal of this rank."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, Any] | None = None

    def propose(self, what: bytes, *, trouble: bool, device: torch.device) -> None:
        """Begin to compare `what` with that of all ranks, and tell them of trouble. Collective."""
        number = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "big") >> 2
        words = torch.tensor([number, -number, int(trouble)], device=of_control(device))
        self._sent = words, dist.all_reduce(words, dist.ReduceOp.MAX, async_op=True)

    def reached(self) -> bool:
        """Wait; return whether all ranks proposed the same, and none has trouble."""
        assert self._sent is not None  # noqa: S101 - propose() came first
        words, work = self._sent
        self._sent = None
        work.wait()
        highest, lowest, trouble = words.tolist()
        return bool(highest == -lowest and not trouble)


def of_control(device: torch.device) -> torch.device:
    """Return the device for small messages: the processor, if the group connects processors."""
    cpu = torch.device("cpu")
    if device.type != "cpu" and cpu not in process_groups.device_types(dist.group.WORLD):
        return device
    return cpu


def common_error(
    trouble: UsageError | None, lines: Sequence[str], device: torch.device
) -> UsageError:
    """Return the error that all ranks raise; collective, after an agreement that failed.

    Args:
        trouble: what this rank refuses. Of several ranks' refusals the lowest rank's counts.
        lines: what this rank proposed; the first one names the step.
        device: of the parameters.
    """
    for text in exchange_texts(str(trouble or ""), device):
        if text:
            return UsageError(text)
    theirs = broadcast_text("\n".join(lines), device).split("\n")
    for text in exchange_texts(_difference(lines, theirs), device):
        if text:
            return UsageError(
                f"the ranks do not train the same: {text}; freeze, unfreeze, add, replace and "
                "resize the same on every rank, in the same step"
            )
    return UsageError(f"the ranks do not train the same in {lines[0]}")


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return how these lines differ from rank 0's; empty if they are the same."""
    if list(mine) == list(theirs):
        return ""
    rank = dist.get_rank()
    ours, zeros = set(mine), set(theirs)
    extra = [line for line in mine if line not in zeros]
    missing = [line for line in theirs if line not in ours]
    if extra and missing:
        return f"rank {rank} has {extra[0]}, rank 0 has {missing[0]}"
    if extra:
        return f"rank {rank} has {extra[0]}, rank 0 has not"
    if missing:
        return f"rank 0 has {missing[0]}, rank {rank} has not"
    return f"rank {rank} has the same parameters as rank 0 in another order"


# ---- texts -------------------------------------------------------------------------------


def exchange_texts(text: str, device: torch.device) -> list[str]:
    """Return every rank's text, by rank. Collective; texts are cut at `MOST_BYTES`."""
    device = of_control(device)
    data = text.encode(errors="replace")[:MOST_BYTES]
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    if longest == 0:
        return [""] * world
    found = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(found, _bytes(data, longest, device))
    return [_text(part[:length]) for part, length in zip(found, lengths, strict=True)]


def broadcast_text(text: str, device: torch.device) -> str:
    """Return rank 0's text. Collective."""
    device = of_control(device)
    data = text.encode(errors="replace")[:MOST_BYTES]
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    length = int(size)
    found = _bytes(data[:length], length, device)
    dist.broadcast(found, 0)
    return _text(found)


def _bytes(data: bytes, length: int, device: torch.device) -> Tensor:
    padded = bytearray(max(1, length))
    padded[: len(data)] = data
    return torch.frombuffer(padded, dtype=torch.uint8)[: max(1, length)].to(device)


def _text(data: Tensor) -> str:
    return bytes(data.cpu().tolist()).decode(errors="replace")
