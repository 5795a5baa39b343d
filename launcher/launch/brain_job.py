"""A job with `--brain URL`: it waits for its first slots, and then trains where the Brain says.

Nothing is started before the first grant. If the Brain is away meanwhile, a job with
`--brain-fallback` trains on hosts of its own.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from elastic_driver.brain.grants import MOST_LIVES_ON_S, Grant, JobReport
from elastic_driver.errors import ClusterError, ExitCode, UsageError
from elastic_driver.runtime.brain_link import ANSWER_S, BrainLink, BrainReports, kind_of
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.journal.journal_file import JournalStore
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir, default_state_dir
from elastic_driver.token_roles import job_token
from launcher.launch.plan import LaunchPlan
from launcher.launch.submit import ended_by_signals, submit
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import is_loopback
from rendezvous.errors import TokenError

BRAIN_FOLDER = "elastic-brain"  # beside the folder of all runs
ALIVE_FILE = "alive"  # in the run's folder, touched every few seconds
JOBS_TOKEN_FILE = "job.token"  # noqa: S105 - the name of a file


def submit_to_brain(
    plan: LaunchPlan,
    run_dir: RunDir,
    run: ResumedRun | None,
    store: JournalStore | None,
    say: Callable[[str], None],
) -> JobResult:
    """Run the job on the slots that the Brain grants; return its result.

    Raises ElasticError if that is impossible.
    """
    if plan.fallback is not None and run is not None and run.settings.auto_scale:
        return submit(plan.fallback, run_dir, run, store)
    brain = _reports(plan, run_dir, run, say)
    granted = None
    try:
        if run is not None:
            if _may_have_lost_its_slots(run, run_dir, brain):
                _hear_of_slots(plan, run, brain, say)
            return submit(plan, run_dir, run, store, brain=brain)
        granted = _first_hosts(plan, brain, say)
        if granted is not None:
            return submit(plan, run_dir, None, store, brain=brain, granted=granted)
    finally:
        brain.end(ExitCode.UNAVAILABLE)  # if the driver has not done so
    if plan.fallback is None:
        raise AssertionError("a job without slots and without hosts of its own has ended")
    return submit(plan.fallback, run_dir, None, store)


def _first_hosts(plan: LaunchPlan, brain: BrainReports, say: Callable[[str], None]) -> Hosts | None:
    """Wait for the hosts of the first grant; None: the Brain is away, and the job needs none.

    Raises ClusterError if they do not come in time.
    """
    link = brain.link
    grant = _wait(brain, brain.first(plan.settings.min_np, plan.settings.max_np), plan)
    if grant is not None:
        return tuple(grant.hosts.items())
    if link.answers or plan.fallback is None:
        _give_up(plan, link, "add --brain-fallback")
    say(f"the Brain at {link.url} is away: the job trains on its own hosts, with --auto-scale")
    return None


def _wait(brain: BrainReports, report: JobReport, plan: LaunchPlan, after: int = 0) -> Grant | None:
    """Ask for slots; return a grant with a higher number than `after`, None if none comes."""
    brain.link.update(report)
    with ended_by_signals("the wait for the Brain"):
        return brain.link.first_grant(plan.settings.start_timeout, after)


def _give_up(plan: LaunchPlan, link: BrainLink, hint: str) -> NoReturn:
    patience = plan.settings.start_timeout
    if link.answers:
        raise ClusterError(
            f"the Brain at {link.url} granted no slots within {patience:g} s; raise "
            "--start-timeout, or lower --min-np"
        )
    raise ClusterError(
        f"the Brain at {link.url} did not answer within {patience:g} s; start it, raise "
        f"--start-timeout, or {hint}"
    )


def _may_have_lost_its_slots(run: ResumedRun, run_dir: RunDir, brain: BrainReports) -> bool:
    """Return whether the last driver may have ended so long ago that other jobs have its slots.

    All its workers have ended by themselves then.
    """
    last = run.at + run.unix_offset
    with contextlib.suppress(OSError):  # it died on another machine
        last = max(last, (run_dir.path / ALIVE_FILE).stat().st_mtime)
    return time.time() >= last + brain.lives_on


def _hear_of_slots(
    plan: LaunchPlan, run: ResumedRun, brain: BrainReports, say: Callable[[str], None]
) -> None:
    """Wait until the Brain says which slots the job has now; raises ClusterError if it does not."""
    say(f"the last driver ended long ago: the Brain at {brain.link.url} may grant other slots now")
    capacity = run.job.capacity
    report = brain.first(capacity.least, capacity.most, capacity.target)
    if _wait(brain, report, plan, run.job.inventory.newest_grant) is None:
        _give_up(plan, brain.link, "resume the job later")


def _reports(
    plan: LaunchPlan, run_dir: RunDir, run: ResumedRun | None, say: Callable[[str], None]
) -> BrainReports:
    """Return what reports the job to the Brain; raises UsageError if that cannot work."""
    settings = plan.settings
    spec = plan.spec
    options = plan.options
    client = brain_client(str(options.brain), options.brain_token_file, spec.run_id)
    began = time.time() if run is None else run.job.inventory.began
    silence = max(spec.driver_timeout, settings.heartbeat_timeout)
    lives_on = silence + settings.grace_period + settings.stop_grace
    if lives_on > MOST_LIVES_ON_S:
        raise UsageError(
            f"with --brain, workers live on without a driver for {MOST_LIVES_ON_S / 86400:g} days "
            "at most; lower --driver-timeout, --heartbeat-timeout or --grace-period"
        )
    alive = run_dir.path / ALIVE_FILE
    ports = plan.driver.any_port
    return BrainReports(
        link=BrainLink(client, spec.run_id, say, alive, ports),
        began=began,
        weight=options.weight,
        kind=kind_of(spec),
        lives_on=lives_on,
    )


def brain_client(url: str, token_file: str | None, job: str) -> RendezvousClient:
    """Return a client of the Brain with the token of this job; raises UsageError if it has none."""
    host = str(urlsplit(url).hostname)
    if url.startswith("http:") and not is_loopback(host):
        raise UsageError(
            f"--brain {url}: beyond this machine a Brain speaks TLS only; write https://"
        )
    path = default_brain_dir(os.environ) / JOBS_TOKEN_FILE if token_file is None else token_file
    if not Path(path).exists():
        raise UsageError(
            f"there is no token of the Brain in {path}; give --brain-token-file with a copy of the "
            f"{JOBS_TOKEN_FILE} that it has written"
        )
    try:
        found = read_credentials(path)
        token = job_token(found.token, job)
        return RendezvousClient(url, token, ANSWER_S, fingerprint=found.fingerprint)
    except TokenError as error:
        raise UsageError(f"--brain-token-file: {error}") from error
    except ValueError as error:
        raise UsageError(f"--brain {url}: {error}") from error


def default_brain_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of the Brain of this user on this machine."""
    return default_state_dir(environ).with_name(BRAIN_FOLDER)
