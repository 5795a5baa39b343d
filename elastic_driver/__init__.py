"""Elastic training: `import elastic_driver as elastic`.

The names in `__all__` are all that a script needs. Each is loaded on first use, so importing this
package costs milliseconds and does not import torch.
"""

from importlib import import_module
from os.path import exists, join
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors: the names of `_NAMES`
    from elastic_driver.arithmetic import allocate_microbatches as allocate_microbatches
    from elastic_driver.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from elastic_driver.errors import WorldBrokenError as WorldBrokenError
    from elastic_driver.features.shards.worker.dataset import ShardedDataset as ShardedDataset
    from elastic_driver.features.shards.worker.shard_client import (
        IncompleteDataError as IncompleteDataError,
    )
    from elastic_driver.features.shards.worker.shard_client import ShardClient as ShardClient
    from elastic_driver.worker.batches import FixedBatch as FixedBatch
    from elastic_driver.worker.current import cross_rank as cross_rank
    from elastic_driver.worker.current import cross_size as cross_size
    from elastic_driver.worker.current import is_initialized as is_initialized
    from elastic_driver.worker.current import local_rank as local_rank
    from elastic_driver.worker.current import local_size as local_size
    from elastic_driver.worker.current import rank as rank
    from elastic_driver.worker.current import round_id as round_id
    from elastic_driver.worker.current import size as size
    from elastic_driver.worker.current import slot as slot
    from elastic_driver.worker.run import run as run
    from elastic_driver.worker.sampler import ElasticSampler as ElasticSampler
    from elastic_driver.worker.state import ObjectState as ObjectState
    from elastic_driver.worker.state import State as State
    from elastic_driver.worker.state import TorchState as TorchState
    from elastic_driver.worker.world.session import busy as busy
    from elastic_driver.worker.world.session import cross_group as cross_group
    from elastic_driver.worker.world.session import init as init
    from elastic_driver.worker.world.session import local_group as local_group
    from elastic_driver.worker.world.session import report_progress as report_progress
    from elastic_driver.worker.world.session import shutdown as shutdown
    from elastic_driver.worker.world.wrapping import wrap as wrap

_NAMES = {  # by module
    "arithmetic": "allocate_microbatches",
    "errors": "HostsUpdatedInterrupt WorldBrokenError",
    "worker.batches": "FixedBatch",
    "worker.current": "cross_rank cross_size is_initialized local_rank local_size rank round_id "
    "size slot",
    "worker.run": "run",
    "worker.sampler": "ElasticSampler",
    "features.shards.worker.dataset": "ShardedDataset",
    "features.shards.worker.shard_client": "IncompleteDataError ShardClient",
    "worker.state": "ObjectState State TorchState",
    "worker.world.session": "busy cross_group init local_group report_progress shutdown",
    "worker.world.wrapping": "wrap",
}
_MODULES = {
    name: module
    for module, names in _NAMES.items()
    for name in names.split()
    # A feature whose folder is not there has no names.
    if not module.startswith("features.") or exists(join(__path__[0], *module.split(".")[:2]))
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
