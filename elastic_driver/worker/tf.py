"""The names of `elastic_driver.features.tensorflow.worker`, where scripts look for them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_driver.features.tensorflow.worker import (
        ClusterSpec,
        TfClusterError,
        TfNode,
        tf_config,
    )

__all__ = ["ClusterSpec", "TfClusterError", "TfNode", "tf_config"]


def __getattr__(name: str) -> Any:
    return getattr(import_module("elastic_driver.features.tensorflow.worker"), name)
