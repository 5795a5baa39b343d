"""Elastic training: `import elastic_driver as elastic`.

The names in `__all__` are all that a script needs. Each is loaded on first use, so importing this
package costs milliseconds and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_driver.batch.microbatches import allocate_microbatches
    from elastic_driver.errors import HostsUpdatedInterrupt, WorldBrokenError
    from elastic_driver.worker.batches import FixedBatch
    from elastic_driver.worker.current import (
        cross_rank,
        cross_size,
        is_initialized,
        local_rank,
        local_size,
        rank,
        round_id,
        size,
        slot,
    )
    from elastic_driver.worker.run import run
    from elastic_driver.worker.sampler import ElasticSampler
    from elastic_driver.worker.sharded import ShardedDataset
    from elastic_driver.worker.shards import IncompleteDataError, ShardClient
    from elastic_driver.worker.state import ObjectState, State, TorchState
    from elastic_driver.worker.world.session import busy, init, report_progress, shutdown
    from elastic_driver.worker.world.wrapping import wrap

__all__ = [
    "ElasticSampler",
    "FixedBatch",
    "HostsUpdatedInterrupt",
    "IncompleteDataError",
    "ObjectState",
    "ShardClient",
    "ShardedDataset",
    "State",
    "TorchState",
    "WorldBrokenError",
    "allocate_microbatches",
    "busy",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "report_progress",
    "round_id",
    "run",
    "shutdown",
    "size",
    "slot",
    "wrap",
]

_MODULES = {
    "ElasticSampler": "worker.sampler",
    "FixedBatch": "worker.batches",
    "HostsUpdatedInterrupt": "errors",
    "IncompleteDataError": "worker.shards",
    "ObjectState": "worker.state",
    "ShardClient": "worker.shards",
    "ShardedDataset": "worker.sharded",
    "State": "worker.state",
    "TorchState": "worker.state",
    "WorldBrokenError": "errors",
    "allocate_microbatches": "batch.microbatches",
    "busy": "worker.world.session",
    "init": "worker.world.session",
    "report_progress": "worker.world.session",
    "run": "worker.run",
    "shutdown": "worker.world.session",
    "wrap": "worker.world.wrapping",
}
_CURRENT = "worker.current"  # the module of all other names


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, _CURRENT)}"), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
