"""Carries out what a command line asks for: shows something, or runs a job to its end.

`launcher.cli` calls `run`. Here the plan meets this machine: facts are collected before, and
the parts of a running job are put together after. No decision about the job is taken here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from elastic_driver.errors import ExitCode
from elastic_driver.runtime.rundir import RunDir, default_state_dir, new_run_id
from launcher import options as o
from launcher.build_info import render_build, render_version
from launcher.checks import check_plan, read_hostfile, this_machine
from launcher.commandline import CommandLine, resolve
from launcher.help import render_help
from launcher.mpi_ranks import meet_ranks, started_ranks
from launcher.options import Option
from launcher.plan import Facts, make_plan

_SHOW: dict[Option[bool], Callable[[], str]] = {
    o.HELP: render_help,
    o.VERSION: render_version,
    o.CHECK_BUILD: render_build,
}


def run(argv: Sequence[str]) -> int:
    """Do what `argv` says; returns the exit status, raises `ElasticError` for the rest."""
    line = resolve(argv, os.environ)
    for option, render in _SHOW.items():
        if line.values[option]:
            print(render(), flush=True)
            return int(ExitCode.OK)
    facts = collect_facts(line, os.environ)
    if line.values[o.BACKEND] == "mpi" and started_ranks(os.environ) > 1:
        ranks = meet_ranks()
        if ranks is None:
            return int(ExitCode.OK)
        facts = replace(facts, ranks=ranks)
    plan = make_plan(line, facts)
    run_dir = RunDir(Path(plan.state_dir), plan.spec.run_id)
    dry = line.values[o.DRY_RUN]
    check_plan(plan, os.environ, create=not dry)
    if dry:
        print(plan.render(origins=line.values[o.VERBOSE]), flush=True)
        return int(ExitCode.OK)
    for note in plan.notes:
        print(f"elasticrun: {note}", file=sys.stderr)
    from launcher.submit import submit  # noqa: PLC0415 - aiohttp's import is not for --help

    return submit(plan, run_dir)


def collect_facts(line: CommandLine, environ: Mapping[str, str]) -> Facts:
    """What planning has to know of this machine; raises UsageError for an unreadable hostfile."""
    values = line.values
    state_dir = values[o.STATE_DIR]
    hostfile = values[o.HOSTFILE]
    return Facts(
        run_id=values[o.RUN_ID] or new_run_id(time.time()),
        state_dir=str(Path(state_dir).absolute() if state_dir else default_state_dir(environ)),
        cwd=os.getcwd(),
        python=sys.executable,
        machine=this_machine(environ),
        hostfile_text=None if hostfile is None else read_hostfile(hostfile),
        environ=dict(environ),
    )
