"""The plan of a job's warm parent: its command, its variables, the modules to import.

The agent makes the plan once, when it has read the job's specification, and `starter` carries it
out. The plan also checks each request: a worker can be forked only if it has the command, the
folder and the variables (those that imports may read) that its warm parent was started with.
"""

import hashlib
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import elastic_driver.worker
from elastic_driver.contract import TORCHRUN_NAMES, VISIBLE_DEVICES
from elastic_driver.words.orders import JobSpec
from launcher.agent.environment import common_environment
from launcher.agent.processes import ProcessSpec
from launcher.agent.warm import command as commands
from launcher.agent.warm.command import NotWarmable

DEFAULT_PRELOAD = ("torch",)

_THREADS = "OMP_NUM_THREADS"
_OWN_PACKAGES = ("elastic_driver", "rendezvous", "launcher")

# Variables in which workers may differ from their warm parent, because libraries read them when
# they are used. (OMP_NUM_THREADS is read at the import, so a worker sets torch's threads again.)
_LATE = frozenset((*TORCHRUN_NAMES, _THREADS, "TF_CONFIG", *VISIBLE_DEVICES))
_LATE_PREFIXES = ("ELASTIC_", "TORCHELASTIC_", "HOROVOD_", "GLOO_", "NCCL_")


@dataclass(frozen=True)
class WarmPlan:
    """One warm parent: it is started with `argv`, `env` and `cwd`, and imports `preload`."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    preload: tuple[str, ...]
    path0: str | None  # where the interpreter finds modules first
    spares: int
    rehearse: bool = True  # also take a tiny training step, if torch is among the modules

    def digest(self) -> str:
        """Return a hash of the plan; equal plans have equal hashes on all machines."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def check(self, spec: ProcessSpec, threads: int) -> None:
        """Raise `NotWarmable` with the reason if `spec` needs a new interpreter.

        `threads` is the size of torch's thread pool in the warm parent. A worker's may be smaller.
        """
        if spec.argv != self.argv:
            raise NotWarmable(f"the command {spec.argv[0]!r} is not the one that is kept warm")
        if spec.cwd != self.cwd or not os.path.isdir(spec.cwd):
            raise NotWarmable(f"the working directory {spec.cwd!r} is not the warm parent's")
        early = early_variables(spec.env)
        names = sorted(name for name in early.keys() | self.env.keys() if not _is_late(name))
        changed = [name for name in names if early.get(name) != self.env.get(name)]
        if changed:
            raise NotWarmable(f"{', '.join(changed)} differ from when the warm parent was started")
        wanted = spec.env.get(_THREADS)
        if wanted != self.env.get(_THREADS) and str(wanted) not in map(str, range(1, threads + 1)):
            raise NotWarmable(f"{_THREADS} differs from when the warm parent was started")


def early_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all workers of a job have in common, and that imports may read."""
    return {name: value for name, value in env.items() if not _is_late(name) or name == _THREADS}


def plan(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    warm: int | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    rehearse: bool = True,
) -> WarmPlan:
    """Return the warm parent for a job's command; raises `NotWarmable` if there should be none.

    Args:
        argv: the command of every worker, interpreter first.
        env: the variables of a worker, also those that differ between workers.
        cwd: the working directory of the workers.
        warm: spares to keep (`--warm`); 0: no warm workers; None: one spare, or none if `preload`
            is the default and the program surely imports nothing but the standard library.
        preload: modules to import (`--preload`).
        rehearse: also take a tiny training step.
    """
    if warm == 0:
        raise NotWarmable("warm workers are switched off (--warm 0)")
    command = commands.parse(argv, env)
    used = commands.imports(command, cwd)
    if warm is None and tuple(preload) == DEFAULT_PRELOAD and commands.only_standard_library(used):
        raise NotWarmable("the program imports nothing but the standard library")
    path0 = commands.first_path(command, cwd)
    modules = list(preload)
    if used is not None and "elastic_driver" in used and not _has_own(path0):
        # `elastic_driver` imports these as its names are used; they import all the rest.
        package = elastic_driver.worker
        found = pkgutil.iter_modules(package.__path__)
        modules += [f"{package.__name__}.{module.name}" for module in found]
    early, unique, spares = early_variables(env), tuple(dict.fromkeys(modules)), warm or 1
    return WarmPlan(tuple(argv), early, cwd, unique, path0, spares, rehearse=rehearse)


def plan_for(spec: JobSpec, inherited: Mapping[str, str]) -> WarmPlan:
    """Return the warm parent of a job's workers; raises `NotWarmable` if there should be none.

    `inherited` is the environment of the agent.
    """
    env = common_environment(inherited, spec)
    return plan(
        spec.command, env, spec.cwd, warm=spec.warm, preload=spec.preload, rehearse=spec.rehearse
    )


def _has_own(path0: str | None) -> bool:
    """Return whether there are modules with the names of our packages beside the script."""
    home = os.path.dirname(elastic_driver.__path__[0])
    return path0 not in (None, home) and any(
        commands.local_files(str(path0), name) for name in _OWN_PACKAGES
    )


def _is_late(name: str) -> bool:
    return name in _LATE or name.startswith(_LATE_PREFIXES)
