"""Collects the facts of this machine that a plan needs. Nothing is changed."""

import glob
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import default_state_dir, new_run_id
from launcher.join.identity import own_name
from launcher.options import table as o
from launcher.options.values import CommandLine
from launcher.plan.hosts import HOSTFILE, choose_discovery
from launcher.plan.launch import Facts
from launcher.plan.role import Serve
from launcher.plan.sizes import MachineFacts


def collect_facts(
    line: CommandLine, environ: Mapping[str, str], role: Serve | None = None
) -> Facts:
    """Return the facts of this machine; raises UsageError for an unreadable hostfile."""
    values = line.values
    cwd = working_folder()
    state_dir = values[o.STATE_DIR]
    name, argument = choose_discovery(values) or ("", "")
    return Facts(
        run_id=values[o.RUN_ID] or new_run_id(time.time()),
        state_dir=str(Path(state_dir).absolute() if state_dir else default_state_dir(environ)),
        cwd=cwd,
        python=sys.executable,
        machine=this_machine(environ),
        hostfile_text=read_hostfile(argument) if name == HOSTFILE else None,
        environ=dict(environ),
        role=role,
        name=own_name(),
    )


def this_machine(environ: Mapping[str, str]) -> MachineFacts:
    """Return the cores and NVIDIA GPUs, without importing torch (which takes a second)."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    else:
        # CUDA ignores everything from the first invalid entry on; -1 is the usual one.
        listed = [entry.strip() for entry in visible.split(",")]
        gpus = next((n for n, e in enumerate(listed) if not e or e.startswith("-")), len(listed))
    return MachineFacts(cpus=len(os.sched_getaffinity(0)), gpus=gpus)


def working_folder() -> str:
    """Return the working folder; raises UsageError if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been deleted; cd to one that exists") from None


def read_hostfile(path: str) -> str:
    """Return the text of a hostfile; raises UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the hostfile {path} is not UTF-8 text") from None
