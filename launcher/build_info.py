"""`elasticrun --version` and `--check-build`: what this installation is and what it can do."""

from __future__ import annotations

import platform
import shutil
from importlib import metadata

DISTRIBUTION = "elastic-driver"


def version() -> str:
    """The installed version; `unknown` when run from a folder that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def render_version() -> str:
    """The line of `--version`."""
    return f"elasticrun {version()}"


def render_build() -> str:
    """One line a capability, `[X]` for those that are there (horovodrun's form)."""
    lines = [f"elastic-driver {version()}, Python {platform.python_version()}", ""]
    lines += ["Backends that start agents:", _line(True, "local")]
    starters = (("ssh", "ssh"), ("srun", "slurm"), ("mpirun", "mpi"))
    lines += [_line(shutil.which(program) is not None, name) for program, name in starters]
    lines.append("")
    lines += ["Collectives (torch.distributed):", *_collectives(), ""]
    lines += ["Tools:", _line(shutil.which("nvidia-smi") is not None, "nvidia-smi")]
    return "\n".join(lines)


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
