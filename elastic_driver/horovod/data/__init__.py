"""Horovod's base classes of loaders, which need no framework."""

from elastic_driver.horovod.data.data_loader_base import (
    AsyncDataLoaderMixin as AsyncDataLoaderMixin,
)
from elastic_driver.horovod.data.data_loader_base import BaseDataLoader as BaseDataLoader
