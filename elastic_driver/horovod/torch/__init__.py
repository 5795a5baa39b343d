"""Horovod's API for PyTorch: `import elastic_driver.horovod.torch as hvd`."""

from elastic_driver.horovod.torch import elastic as elastic
from elastic_driver.horovod.torch import mpi_ops as mpi_ops
from elastic_driver.horovod.torch.compression import Compression as Compression
from elastic_driver.horovod.torch.functions import *  # noqa: F403 - the names of its `__all__`
from elastic_driver.horovod.torch.mpi_ops import *  # noqa: F403 - the names of its `__all__`
from elastic_driver.horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from elastic_driver.horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
