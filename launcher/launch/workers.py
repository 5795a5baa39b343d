"""The workers' command, environment and TensorFlow roles. Pure.

A login over ssh has almost none of this shell's variables. Passing on all of them would be wrong:
some belong to this machine alone, some are secrets. So only variables that configure Python,
numerics and communication are passed on to other hosts, by name; `-x NAME` adds others.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.masking import is_secret
from elastic_driver.options import TfRoles
from elastic_driver.settings import Settings
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.tf_config import CHIEF, PS, WORKERS_ONLY
from launcher.backends.mpi_ranks import settings_of_mpirun
from launcher.backends.slurm_allocation import variables_beside_srun
from launcher.launch.hosts import Facts
from launcher.options.horovod import worker_variables
from launcher.options.table import LaunchOptions
from launcher.options.values import CommandLine

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
HEARTBEAT_S = 0.4  # between two heartbeats of an agent
HEARTBEATS_PER_S = 1000  # of all agents together: what the driver takes with little of a core
NAMED_JOB_WAITS_S = 300.0  # a person or systemd starts the next driver well within this time
TF_PORTS = 128  # free ports that each agent finds: more than a host has slots

PASSED_ON = (
    *("PATH", "PWD", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_*", "TZ"),
    "PYTHON*",
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),  # threads and numerics
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUDA_*", "CUBLAS_*", "CUDNN_*"),
    *("TF_CPP_*", "TF_ENABLE_*", "TF_GPU_*", "TF_NUM_*", "TF_USE_*", "XLA_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*"),  # communication
)
# Variables of one machine only.
OF_THIS_MACHINE = (
    *(*contract.VISIBLE_DEVICES, "NCCL_HOSTID", "*_SOCKET_IFNAME"),
    *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"),
)


def split_variables(command: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables in front of a command, which a shell would set, and the rest of it."""
    variables: dict[str, str] = {}
    for number, word in enumerate(command):
        if _ASSIGNMENT.match(word) is None:
            return variables, command[number:]
        name, _, value = word.partition("=")
        variables[name] = value
    return variables, ()


def worker_command(
    command: tuple[str, ...], python: str, *, script: bool = False
) -> tuple[str, ...]:
    """Return a worker's argv: `python` runs scripts and modules, other commands stay.

    `script`: the command is a script, whatever its name.
    """
    if not command:
        raise UsageError("no command to run; use elasticrun [OPTIONS] -- script.py [ARGS…]")
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError("-m needs the name of a module: elasticrun [OPTIONS] -m MODULE")
        return (python, *command)
    if not command[0]:
        raise UsageError("the command is an empty word; is a shell variable not set?")
    return (python, *command) if script or command[0].endswith(".py") else command


def job_spec(
    line: CommandLine,
    settings: Settings,
    facts: Facts,
    *,
    backend: str,
    hosts: int,
) -> tuple[JobSpec, tuple[str, ...], list[str]]:
    """Return the specification of the job, the variables that workers get from here, and remarks.

    `backend`: what starts the agents. `hosts`: how many are listed. The remarks are about variables
    of `--env` that are not set here.
    """
    shares = backend in ("local", "join")  # workers inherit the environment of a process like this
    options, environ = line.options, facts.environ
    given = {name: environ.get(name) if v is None else v for name, v in options.env}
    unset = [
        f"-x {n}: it is not set here, and is not passed on" for n, v in given.items() if v is None
    ]
    env = {name: value for name, value in given.items() if value is not None}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if options.network_interfaces else ():
        env.setdefault(name, ",".join(options.network_interfaces or ()))
    virtual = options.virtual_workers or settings.max_np
    if virtual is not None:
        env[contract.VIRTUAL_WORKERS] = str(virtual)
    if options.balance:
        env[contract.BALANCE] = "1"
    if settings.auto_scale or options.brain is not None:
        env[contract.MEASURE_GRADIENTS] = "1"
    own, command = split_variables(line.command)
    env = {**worker_variables(options, environ if shares else {}), **env, **own}
    passed_on = {} if shares else forwarded(environ)
    if backend == "slurm":
        passed_on |= variables_beside_srun(environ)
    elif backend == "mpi":  # mpirun passes them on to its ranks, and so do we
        passed_on |= settings_of_mpirun(environ)
    spec = line.fill(
        JobSpec,
        run_id=facts.run_id,
        command=worker_command(command, facts.python, script=options.run_path),
        cwd=facts.cwd,
        env={**passed_on, **env},
        max_restarts=settings.max_restarts or 0,
        driver_timeout=driver_timeout(options),
        heartbeat_interval=max(HEARTBEAT_S, hosts / HEARTBEATS_PER_S),
    )
    if settings.tf_roles is not None:
        # TensorFlow starts threads when imported, and a process with threads cannot be forked
        # safely: no warm processes unless an option asks for them.
        spec = replace(spec, warm=spec.warm or 0, slot_ports=TF_PORTS)
    return spec, tuple(name for name in passed_on if name not in env), unset


def driver_timeout(options: LaunchOptions) -> float:
    """Return the seconds for which agents and workers wait for the next driver; 0: not at all.

    Only a job that was given a name is likely to be resumed; others leave nothing behind.
    """
    if options.driver_timeout is not None:
        return options.driver_timeout
    return 0.0 if options.run_id is None else NAMED_JOB_WAITS_S


# ---- variables of this shell -------------------------------------------------------------


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers on other hosts get from here by default."""
    return {name: environ[name] for name in sorted(environ) if is_forwarded(name)}


def is_forwarded(name: str) -> bool:
    """Return whether a variable is passed on; never if its name looks like a secret's."""

    def matches(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return matches(PASSED_ON) and not (matches(OF_THIS_MACHINE) or is_secret(name))


# ---- TensorFlow --------------------------------------------------------------------------


def tf_roles(line: CommandLine) -> TfRoles | None:
    """Return the roles of the workers in TF_CONFIG; None: they get no TF_CONFIG."""
    asked: TfRoles | None = line["tf_roles"]
    return WORKERS_ONLY if asked is None and line.options.tf_config else asked


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
