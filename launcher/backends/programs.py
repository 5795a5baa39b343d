"""Whether the program that is to start the agents is here: srun, Open MPI's mpirun.

`launcher.submit.checks` asks, also for --dry-run. A finding is a `UsageError` of a line.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from elastic_driver.errors import UsageError

_ASK_S = 10.0


def check_starter(backend: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError where this backend's program is missing, or is one we do not know."""
    path = environ.get("PATH")
    if backend == "slurm" and shutil.which("srun", path=path) is None:
        raise UsageError(
            "srun was not found, which starts agents inside a Slurm allocation; check PATH, or say "
            "--standalone for this machine alone"
        )
    if backend == "mpi":
        _check_mpirun(shutil.which("mpirun", path=path))


def _check_mpirun(program: str | None) -> None:
    if program is None:
        raise UsageError("--backend mpi needs mpirun, which was not found; install Open MPI")
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--backend mpi: {program} --version fails: {error}") from None
    if "Open MPI" not in done.stdout + done.stderr:
        raise UsageError(f"--backend mpi needs Open MPI, and {program} is not; use --backend ssh")
