"""Which variables of this shell reach the workers on other hosts without being asked for. Pure.

A login over ssh has next to none of them, and all of them would be too many: some are of this
machine alone, some are secrets. So only what is known to shape Python, numerics and communication
goes, by name; `-x NAME` adds others. `launch` calls it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

PASSED_ON = (
    *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_*", "TZ"),
    "PYTHON*",
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),  # threads and numerics
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUDA_*", "CUBLAS_*", "CUDNN_*"),
    *("TF_CPP_*", "TF_ENABLE_*", "TF_GPU_*", "TF_NUM_*", "TF_USE_*", "XLA_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*"),  # communication
)
# Of these some are of one machine only, or would change who answers to a name.
OF_THIS_MACHINE = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "*_SOCKET_IFNAME"),
    *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"),
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH")


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers on other hosts get from here by default, by name."""
    return {name: environ[name] for name in sorted(environ) if is_forwarded(name)}


def is_forwarded(name: str) -> bool:
    """Whether a variable is passed on; never one whose name looks like a secret's."""
    if _SECRET.search(name.upper()) or _matches(name, OF_THIS_MACHINE):
        return False
    return _matches(name, PASSED_ON)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
