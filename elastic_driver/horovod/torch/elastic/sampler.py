"""`hvd.elastic.ElasticSampler`: the script records its batches, the rest is shared anew.

Ours of `elastic_driver` counts by itself and holds no list; this one has Horovod's fields.
"""

from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice

from torch.utils.data import Sampler

from elastic_driver.arithmetic import Permutation, mix
from elastic_driver.horovod.common.exceptions import NotInYetError
from elastic_driver.worker.current import NotInitializedError, rank_and_size
from elastic_driver.worker.positions import Counted
from elastic_driver.worker.sampler import require_length

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):  # type: ignore[misc] # torch has no types
    """A sampler that shares what is left of an epoch among the ranks of each new world.

    Call `record_batch` after each step, and `set_epoch` at the end of an epoch. As an attribute of
    a `TorchState` it is committed, restored and sent with it.

    Args:
        dataset: anything with a length.
        shuffle: whether each epoch has a random order.
        seed: of all epochs' orders; the same on every rank.

    Attributes:
        epoch: the present one.
        processed_num: samples of this epoch that all ranks together have recorded.
        num_replicas, rank: the size of the world, and this process's rank.
        remaining_indices: what is left of the epoch, in its order.
        num_samples: of each rank in the next pass; the first ones are repeated where they do not
            divide evenly.
        total_size: of all ranks.

    Raises `UsageError` for a data set without a length, and `NotInYetError` in a process of
    `elasticrun` before `hvd.init()`: nobody knows the size of the world then.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        require_length(dataset, type(self).__name__)
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.counted = Counted()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its start."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's
        """Record that each rank has trained a batch of so many samples."""
        self.processed_num += batch_size * self.num_replicas
        self.counted = Counted(self.counted.samples + batch_size)

    def reset(self) -> None:
        """Share what is not recorded among the ranks of the present world."""
        try:
            self.rank, self.num_replicas = rank_and_size()
        except NotInitializedError as error:
            raise NotInYetError("Horovod is not initialized; call hvd.init() first") from error
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            order = Permutation(len(indices), mix(self.seed, self.epoch))
            indices = [order[position] for position in indices]
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the progress of the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from this progress, in the present world."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """Return this rank's share of what is left."""
        shared = islice(cycle(self.remaining_indices), self.total_size)
        return islice(shared, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
