"""The capabilities of this installation, for `elasticrun --check-build`."""

import os
import platform
import shutil

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher import version
from launcher.backends.registry import BACKENDS, entry_points, make_backend


def render_build() -> str:
    """Return a line for each capability, `[X]` for those of this installation (as horovodrun)."""
    lines = [f"elastic-driver {version()}, Python {platform.python_version()}", ""]
    lines += ["Backends that start agents:", *map(_backend_line, entry_points(BACKENDS)), ""]
    lines += ["Collectives (torch.distributed):", *_collectives(), ""]
    lines += ["Tools:", _line(shutil.which("nvidia-smi") is not None, "nvidia-smi")]
    return "\n".join(lines)


def _backend_line(name: str) -> str:
    try:
        make_backend(name, BackendJob(environ=os.environ, allocation="0")).check(())
    except UsageError as error:
        return _line(False, f"{name} ({error})")
    return _line(True, name)


def _collectives() -> list[str]:
    try:
        import torch  # noqa: PLC0415 - a second's import that no other command pays for
        import torch.distributed as dist  # noqa: PLC0415
    except ImportError as error:
        return [_line(False, f"torch ({error}); install it: pip install 'elastic-driver[torch]'")]
    if not dist.is_available():
        return [_line(False, f"torch {torch.__version__} was built without torch.distributed")]
    return [
        _line(True, f"torch {torch.__version__}"),
        _line(dist.is_gloo_available(), "gloo"),
        _line(dist.is_nccl_available() and torch.cuda.is_available(), "nccl, with a GPU"),
        _line(dist.is_mpi_available(), "mpi"),
    ]


def _line(there: bool, name: str) -> str:
    return f"    [{'X' if there else ' '}] {name}"
