"""Decides whether a command line begins a job, or goes on with one whose driver has died.

`launcher.run_job` asks before it starts a driver. A run can go on if it is unfinished (`RunDir`)
and no driver holds its lock. One whose agents may live is never begun anew: it goes on, or is
refused. Nothing is started here; the lock of a run that goes on is held when a function returns it.

Agents may live even if the journal is damaged or gone. Those of this machine are processes with the
mark of the run. The event log says which hosts had an agent. The lock says whether a driver that
did not release it had begun the job.
"""

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.job.job import Job
from elastic_driver.options import masked
from elastic_driver.runtime.journal.replay import JournalError, NotBegunError, ResumedRun, load_run
from elastic_driver.runtime.results import JobResult, agents_started, read_result
from elastic_driver.runtime.run_dir import RunDir
from launcher.agent.processes import is_of_this_user
from launcher.backends.local import AGENT
from launcher.network import is_this_machine
from launcher.options.given import CommandLine, resolve_again
from launcher.options.table import OPTIONS

_MODULE = [word.encode() for word in AGENT[1:]]


def agents_here(run_dir: RunDir) -> list[int]:
    """Return the pids of the run's agents that live on this machine."""
    mark = os.fsencode(f"{contract.JOB_MARK}={run_dir.token_file}")
    module = b"\0".join(_MODULE)
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended, or is another user's
            process = Path(f"/proc/{pid}")
            if module not in (process / "cmdline").read_bytes():  # most processes end here
                continue
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked and is_of_this_user(psutil.Process(pid)):
                found.append(pid)
    return found


def may_live(run_dir: RunDir) -> bool:
    """Return whether something says that agents of the run were started, and nothing its end."""
    former = run_dir.lock.former or run_dir.lock.holder
    began = former is not None and former.began
    return began or bool(agents_started(run_dir.events_file)) or bool(agents_here(run_dir))


def nobody_lives(run_dir: RunDir) -> bool:
    """Return whether the run has had agents, all of them on this machine, and none is left."""
    hosts = agents_started(run_dir.events_file)
    return bool(hosts) and all(map(is_this_machine, hosts)) and not agents_here(run_dir)


def unknown_agents(run_dir: RunDir, job: Job) -> list[str]:
    """Return the hosts with agents, if the job knows of none of them: its journal was cut off."""
    hosts = agents_started(run_dir.events_file)
    return [] if any(map(job.fleet.has_had, hosts)) else sorted(hosts)


def how_to_end(run_dir: RunDir) -> str:
    """Return what to type, so that the same command may begin the run anew."""
    here = " ".join(map(str, agents_here(run_dir)))
    folder = str(run_dir.path)
    first = f"end its agents (kill {here})" if here else "wait until its agents have ended"
    if not run_dir.path.exists():
        return first
    return f"{first}, put its files away ({shlex.join(('mv', folder, f'{folder}.damaged'))})"


# Options that may be given with --resume and without a command: they change nothing of the job.
_OF_THIS_TERMINAL = ("log_format", "verbose", "quiet", "no_progress", "dry_run")
_CHOICE = ("run_id", "state_dir", "resume")


def take_named(line: CommandLine, state_dir: Path) -> tuple[RunDir, ResumedRun | JobResult]:
    """Return the run of `--resume --run-id ID`; its result if it is over.

    Raises UsageError if there is no such run, it has a driver, or an option would change it.
    """
    run_id = line.options.run_id
    if run_id is None:
        raise UsageError("--resume needs the name of the job: elasticrun --resume --run-id ID")
    for option in OPTIONS:
        if line.level(option.field) > 1 and option.field not in (*_OF_THIS_TERMINAL, *_CHOICE):
            raise UsageError(
                f"{option.long} cannot be given with --resume and without a command: the job goes "
                "on with the options of its start"
            )
    run_dir = RunDir(state_dir, run_id)
    found = _take(run_dir, keep=line.options.dry_run, alone=True)
    if found is None:
        raise UsageError(
            f"there is no run {run_id} in {state_dir}; is it in another --state-dir? To begin it, "
            "give its command, too"
        )
    return run_dir, found


def take_unfinished(
    line: CommandLine, run_dir: RunDir, cwd: str, *, alone: bool = True
) -> ResumedRun | JobResult | None:
    """Return the run that this command line goes on with; None: it begins a job.

    With --resume, a job that is over is not begun again: its result is returned. `alone` as for
    `load_run`. Raises UsageError if the unfinished job of that name was started with another
    command.
    """
    run_dir.refuse_strangers()
    named = line.options.run_id is not None or run_dir.path.exists()
    if not (line.options.resume or (named and _is_open(run_dir))):
        return None
    found = _take(run_dir, keep=line.options.dry_run, alone=alone)
    if not isinstance(found, ResumedRun):
        return found if line.options.resume else None
    if (found.argv, found.cwd) == (line.words, cwd):
        return found
    run_dir.leave()
    where = f"--state-dir {run_dir.path.parent} " if line.options.state_dir else ""
    again = f"elasticrun --resume {where}--run-id {run_dir.run_id}"
    before = "" if found.cwd == cwd else f" in {found.cwd}"
    started = shlex.join(masked(found.argv))
    raise UsageError(
        f"run {run_dir.run_id} is unfinished: its driver has died, and it was started with another "
        f"command{before}: {started}; go on with it: {again}; or give another --run-id"
    )


def line_of(run: ResumedRun, given: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """Return the command line that the run was started with, read again in its folder.

    The options of the terminal are those of `given`. Changes the working folder: files are named
    relative to it.
    """
    try:
        os.chdir(run.cwd)
    except OSError as error:
        problem = f"the working folder {run.cwd} of run {run.run_id}: {error.strerror}"
        raise UsageError(f"{problem}; make it available, then resume again") from None
    line = resolve_again(run.argv, environ)
    for field in _OF_THIS_TERMINAL:
        if given.level(field):
            line = line.having(field, given.settings[field])
    return replace(line, warnings=(*given.warnings, *line.warnings))


def describe(run_dir: RunDir, run: ResumedRun) -> str:
    """Return a line about a run that goes on."""
    former = run_dir.lock.former
    who = "" if former is None else f" (process {former.pid} of host {former.host})"
    return f"run {run.run_id} goes on after event {run.n}: its driver {run.term}{who} has died"


def _take(run_dir: RunDir, *, keep: bool, alone: bool) -> ResumedRun | JobResult | None:
    """Return the run in this folder, locked; the result of one that is over; None: none of both.

    `keep`: only look. `alone` as for `load_run`.
    """
    run_dir.refuse_strangers()
    if not _is_open(run_dir):
        return read_result(run_dir.events_file)
    there = run_dir.path.exists()
    if there and not keep:
        run_dir.take()
    former = run_dir.lock.former or run_dir.lock.holder
    restarted = former is not None and former.is_of_an_earlier_boot
    try:
        if not run_dir.journal_file.exists():
            raise NotBegunError(f"there is no journal {run_dir.journal_file}")
        run = load_run(run_dir.journal_file, may_be_torn=restarted, alone=alone)
        hosts = [] if restarted else unknown_agents(run_dir, run.job)
        if not hosts:
            return run
        problem = (
            f"{run_dir.journal_file}: the journal ends before the agents on {', '.join(hosts)}"
        )
    except NotBegunError as error:
        if restarted or not may_live(run_dir):
            run_dir.leave()
            return None
        problem = f"{error}, though the job has started agents"
    except JournalError as error:
        problem = str(error)
    run_dir.leave()
    raise JournalError(
        f"{problem}; run {run_dir.run_id} cannot go on, and its workers may train: "
        f"{how_to_end(run_dir)}, and begin it again, from its newest checkpoint"
    )


def _is_open(run_dir: RunDir) -> bool:
    """Return whether the run may have agents that live, or has files with which it can go on."""
    if run_dir.unfinished or agents_started(run_dir.events_file):
        return True
    lock, began = run_dir.lock, False
    if lock.path.exists() and lock.holder is not None:
        began = lock.holder.began
    return began or bool(agents_here(run_dir))
