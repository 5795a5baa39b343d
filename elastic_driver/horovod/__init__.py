"""Horovod's API on our workers: `import elastic_driver.horovod.torch as hvd`.

The path after `elastic_driver.` is Horovod's own, so one substitution converts a script. Names and
meanings are those of Horovod 0.28.1; `docs/horovod.md` lists where they differ. A script that
imports a part of Horovod that is not here gets a sentence about it. Nothing heavy is imported
before a script asks for it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.28.1"  # of the API

_TENSORFLOW = (
    "Horovod's API is here for PyTorch alone; TensorFlow and Keras train with "
    "MultiWorkerMirroredStrategy, for which elasticrun sets TF_CONFIG (docs/tensorflow.md)"
)
_STARTED = (
    "start the script on the hosts themselves: `elasticrun -np N -H … --horovod python SCRIPT`"
)
_INSTEAD = {
    "tensorflow": _TENSORFLOW,
    "keras": _TENSORFLOW,
    "mxnet": "Horovod's API is here for PyTorch alone, and MXNet is developed no more",
    "spark": f"workers are not started by Spark; {_STARTED}",
    "ray": f"workers are not started by Ray; {_STARTED}",
}


class _AbsentParts(MetaPathFinder):
    """The last finder: it answers for parts of this package that no other finder has found."""

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
        if part in _INSTEAD and sys.modules.get(parent) is self._package:
            message = f"horovod.{part} is not here: {_INSTEAD[part]}"
            raise ModuleNotFoundError(message, name=fullname)


if not any(isinstance(finder, _AbsentParts) for finder in sys.meta_path):
    sys.meta_path.append(_AbsentParts(sys.modules[__name__]))


def run(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Raise `UsageError`: `elasticrun` starts the workers."""
    from elastic_driver.errors import UsageError  # noqa: PLC0415 - see above

    raise UsageError(
        "horovod.run() starts no workers here; start the script with "
        "`elasticrun -np N --horovod python SCRIPT`"
    )
