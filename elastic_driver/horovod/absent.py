"""Sentences about the parts of Horovod that are not here, for scripts that import them."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_TENSORFLOW = (
    "Horovod's API is here for PyTorch alone; TensorFlow and Keras train with "
    "MultiWorkerMirroredStrategy, for which elasticrun sets TF_CONFIG (docs/tensorflow.md)"
)
_STARTED = (
    "start the script on the hosts themselves: `elasticrun -np N -H … --horovod python SCRIPT`"
)
INSTEAD = {
    "tensorflow": _TENSORFLOW,
    "keras": _TENSORFLOW,
    "mxnet": "Horovod's API is here for PyTorch alone, and MXNet is developed no more",
    "spark": f"workers are not started by Spark; {_STARTED}",
    "ray": f"workers are not started by Ray; {_STARTED}",
}


class AbsentParts(MetaPathFinder):
    """The last finder: it answers for parts of our package that nobody has found."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> None:
        """Raise `ModuleNotFoundError` with a sentence for a part that Horovod has."""
        parent, _, part = fullname.rpartition(".")
        if part in INSTEAD and sys.modules.get(parent) is self._package:
            raise ModuleNotFoundError(f"horovod.{part} is not here: {INSTEAD[part]}", name=fullname)
