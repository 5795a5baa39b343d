"""`horovod` for scripts under `elasticrun --horovod`: each of its modules is the one of ours.

The folder above is first on the workers' path and lies in no site-packages, so no other program
meets this name.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

import elastic_driver.horovod

_NAME = __name__


class _SameModule(MetaPathFinder, Loader):
    """Finds `horovod.X` as the module `elastic_driver.horovod.X` itself, not as a copy."""

    def __init__(self) -> None:
        self._own: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}.") or find_spec(f"elastic_driver.{fullname}") is None:
            return None
        return spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"elastic_driver.{spec.name}")
        self._own[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which is loaded, its own record back."""
        assert module.__spec__ is not None  # noqa: S101 - the import system has set it
        module.__spec__ = self._own[module.__spec__.name]


if not any(isinstance(finder, _SameModule) for finder in sys.meta_path):
    sys.meta_path.insert(0, _SameModule())
sys.modules[_NAME] = elastic_driver.horovod
