"""The workers' command, environment and TensorFlow roles. Pure.

A login over ssh has next to none of this shell's variables. All of them would be too many: some are
of this machine alone, some are secrets. So only variables known to shape Python, numerics and
communication are passed on to other hosts, by name; `-x NAME` adds others.
"""

import fnmatch
import re
from collections.abc import Mapping

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec
from elastic_driver.core.tf_config import CHIEF, PS, WORKERS_ONLY
from elastic_driver.errors import UsageError
from elastic_driver.settings import Settings, TfRoles
from launcher.options import table as o
from launcher.options.values import OptionValues

TF_PORTS = 128  # that each agent looks for: more than a host has slots for TensorFlow

PASSED_ON = (
    *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_*", "TZ"),
    "PYTHON*",
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),  # threads and numerics
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUDA_*", "CUBLAS_*", "CUDNN_*"),
    *("TF_CPP_*", "TF_ENABLE_*", "TF_GPU_*", "TF_NUM_*", "TF_USE_*", "XLA_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*"),  # communication
)
# Some of these are of one machine only, or would change who answers to a name.
OF_THIS_MACHINE = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "*_SOCKET_IFNAME"),
    *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"),
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH")


def worker_command(command: tuple[str, ...], python: str) -> tuple[str, ...]:
    """Return a worker's argv: scripts and modules run by `python`, everything else unchanged."""
    if not command:
        raise UsageError("no command to run; say elasticrun [OPTIONS] -- script.py [ARGS…]")
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError("-m needs the name of a module: elasticrun [OPTIONS] -m MODULE")
        return (python, *command)
    if not command[0]:
        raise UsageError("the command is an empty word; is a shell variable not set?")
    return (python, *command) if command[0].endswith(".py") else command


def job_spec(
    values: OptionValues,
    settings: Settings,
    *,
    run_id: str,
    command: tuple[str, ...],
    cwd: str,
    environ: Mapping[str, str],
) -> tuple[JobSpec, list[str]]:
    """Return what the workers run, and remarks on variables that are not set in `environ`."""
    given = {
        name: environ.get(name, value) if value is None else value for name, value in values[o.ENV]
    }
    unset = [
        f"-x {name}: it is not set here, and is not passed on"
        for name, value in given.items()
        if value is None
    ]
    env = {name: value for name, value in given.items() if value is not None}
    if interfaces := values[o.NETWORK_INTERFACES]:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, ",".join(interfaces))
    virtual = values[o.VIRTUAL_WORKERS] or settings.max_np
    if virtual is not None:
        env[contract.VIRTUAL_WORKERS] = str(virtual)
    if values[o.BALANCE]:
        env[contract.BALANCE] = "1"
    fields = values.fields("spec")
    if settings.tf_roles is not None:
        # TensorFlow starts threads when imported, and a process with threads cannot be forked
        # safely: no warm processes unless they are asked for.
        fields["warm"] = fields["warm"] or 0
        fields["slot_ports"] = TF_PORTS
    spec = JobSpec(
        run_id=run_id,
        command=command,
        cwd=cwd,
        env=env,
        max_restarts=settings.max_restarts or 0,
        **fields,
    )
    return spec, unset


# ---- variables of this shell -------------------------------------------------------------


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers on other hosts get from here by default."""
    return {name: environ[name] for name in sorted(environ) if is_forwarded(name)}


def is_forwarded(name: str) -> bool:
    """Return whether a variable is passed on; never if its name looks like a secret's."""
    if _SECRET.search(name.upper()) or _matches(name, OF_THIS_MACHINE):
        return False
    return _matches(name, PASSED_ON)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ---- TensorFlow --------------------------------------------------------------------------


def tf_roles(values: OptionValues) -> TfRoles | None:
    """Return the roles of the workers in TF_CONFIG; None: they get no TF_CONFIG."""
    asked = values[o.TF_ROLES]
    if asked is None:
        return WORKERS_ONLY if values[o.TF_CONFIG] else None
    return asked


def check_tf_roles(settings: Settings) -> None:
    """Raise UsageError if the job may go on with fewer workers than its roles take."""
    if settings.tf_roles is None:
        return
    fixed = {role: count for role, count in settings.tf_roles if count}
    trains_alone = CHIEF in fixed and PS not in fixed
    need = sum(fixed.values()) + (not trains_alone)
    if settings.min_np < need:
        named = ", ".join(f"{count} {role}" for role, count in fixed.items())
        more = "" if trains_alone else " and a worker"
        raise UsageError(
            f"--tf-roles: {named}{more} are {need} processes, but the job may go on with "
            f"{settings.min_np}; say --min-np {need}"
        )
