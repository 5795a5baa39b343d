"""Checks of a plan before anything is started: files, commands, interfaces.

Called by `launcher.job` with a finished plan, also for --dry-run. Reads the file system and changes
nothing there except that the log folder is made (`create`). A finding is a `UsageError` of a line.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import psutil

from elastic_driver.errors import UsageError
from launcher.backends.registry import make_backend
from launcher.own_packages import find_shadow
from launcher.plan.hosts import DiscoveredHosts, JoinedHosts
from launcher.plan.launch import LaunchPlan
from launcher.submit.discovery import make_discovery


def check_plan(plan: LaunchPlan, environ: Mapping[str, str], *, create: bool) -> None:
    """Raise UsageError for the first thing that cannot work; `create`: make the log folder."""
    spec = plan.spec
    cwd = Path(spec.cwd)
    worker_environ = {**environ, **spec.env}
    _check_command(spec.command, cwd, worker_environ)
    _check_shadows(spec.command, cwd, worker_environ)
    if isinstance(plan.hosts, DiscoveredHosts):
        make_discovery(plan.hosts)
    if not isinstance(plan.hosts, JoinedHosts):
        make_backend(plan.backend, plan.backend_job(environ)).check(plan.hosts.hosts or ())
    if spec.log_dir is not None:
        _check_log_dir(cwd / spec.log_dir, create=create)
    if plan.backend == "local":  # other hosts may have other ones
        _check_interfaces(spec.env.get("GLOO_SOCKET_IFNAME", ""))


# ---- the command -------------------------------------------------------------------------


def _check_command(command: tuple[str, ...], cwd: Path, environ: Mapping[str, str]) -> None:
    program, *arguments = command
    _check_executable(program, cwd, environ)
    if not is_python(program) or not arguments:
        return
    if arguments[0] == "-m" and len(arguments) > 1:
        if program == sys.executable:
            _check_module(arguments[1], cwd, environ)
    elif not arguments[0].startswith("-"):
        script = cwd / arguments[0]
        if script.suffix == ".py" and not script.exists():
            raise UsageError(f"the script {arguments[0]} does not exist in {cwd}")
        if script.suffix == ".py" and not os.access(script, os.R_OK):
            raise UsageError(f"the script {arguments[0]} cannot be read; check its permissions")
        if script.suffix == ".py" and script.is_dir():
            raise UsageError(f"{arguments[0]} is a folder, not a script")


def is_python(program: str) -> bool:
    """Return whether a command is a Python interpreter: then a script or -m follows."""
    return program == sys.executable or Path(program).name.startswith("python")


def _check_executable(program: str, cwd: Path, environ: Mapping[str, str]) -> None:
    if os.sep in program:
        path = cwd / program
        if path.is_dir():
            raise UsageError(f"the command {program} is a folder")
        if not path.exists():
            raise UsageError(f"the command {program} does not exist (looked in {cwd})")
        if not os.access(path, os.X_OK):
            raise UsageError(f"the command {program} is not executable; try chmod +x {program}")
    elif shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        hint = f"; did you mean ./{program}?" if (cwd / program).is_file() else "; check PATH"
        raise UsageError(f"the command {program} was not found{hint}")


def _check_module(module: str, cwd: Path, environ: Mapping[str, str]) -> None:
    """Look for the top package only: finding a submodule would import its parents."""
    top = module.partition(".")[0]
    folders = [str(folder) for folder in (cwd, *_python_path(cwd, environ))]
    if PathFinder.find_spec(top, folders) is None and find_spec(top) is None:
        raise UsageError(f"-m {module}: there is no module {top} in {cwd} or on Python's path")


def _check_shadows(command: tuple[str, ...], cwd: Path, environ: Mapping[str, str]) -> None:
    """Refuse a user's rendezvous.py beside the script, which would be imported for ours."""
    if not is_python(command[0]) or len(command) < 2:
        return
    script = command[1]
    first = cwd if script.startswith("-") else (cwd / script).resolve().parent
    shadow = find_shadow([first, *_python_path(cwd, environ)])
    if shadow is not None:
        fresh = f"my_{shadow.name}"
        raise UsageError(
            f"{shadow} would be imported by the workers in place of elastic-driver's own "
            f"package of that name; rename it, for instance to {fresh}"
        )


def _python_path(cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    listed = environ.get("PYTHONPATH", "").split(os.pathsep)
    return [cwd / folder for folder in listed if folder]


# ---- files and interfaces ----------------------------------------------------------------


def _check_log_dir(path: Path, *, create: bool) -> None:
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            return
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as error:
        raise UsageError(
            f"cannot write to the log folder {path}: {error.strerror}; choose another --log-dir"
        ) from None


def _check_interfaces(names: str) -> None:
    known = psutil.net_if_addrs()
    for name in filter(None, names.split(",")):
        # Both libraries also take prefixes (eth) and, NCCL, ^exclusions: only a plain miss is one.
        if not name.startswith(("^", "=")) and not any(k.startswith(name) for k in known):
            found = ", ".join(sorted(known))
            raise UsageError(f"there is no network interface {name} here; there are {found}")
