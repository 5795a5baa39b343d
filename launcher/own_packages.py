"""Makes sure that our packages are imported, and not files of the same name.

`rendezvous` and `elastic_driver` are names a user may well have files for. Python looks into the
current folder (with `-m`), the script's folder and PYTHONPATH first, so such a file takes our
place. `pin` protects this process; `find_shadow` lets the launcher refuse a job whose workers
would import the wrong one. A user's `launcher.py` is left in peace: no worker imports ours.
"""

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("elastic_driver", "rendezvous")


def pin() -> None:
    """Load our packages from the folder of this file, so that later imports find ours.

    Only the packages themselves, which are cheap; their modules follow the package's path.
    """
    for name in NAMES:
        if _is_ours(sys.modules.get(name)):
            continue
        spec = PathFinder.find_spec(name, [str(ROOT)])
        if spec is None or spec.loader is None:
            raise ImportError(f"the installation at {ROOT} is incomplete: no package {name}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def find_shadow(folders: Iterable[Path]) -> Path | None:
    """Return the first file or package in these folders that would be imported for one of ours."""
    for folder in folders:
        if folder.resolve() == ROOT:
            return None  # ours is found here, before anything in a later folder
        for name in NAMES:
            for path in (folder / name / "__init__.py", folder / f"{name}.py"):
                if path.is_file():
                    return path.parent if path.name == "__init__.py" else path
    return None


def _is_ours(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().parent.parent == ROOT
