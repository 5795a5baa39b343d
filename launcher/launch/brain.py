"""A job with `--brain URL`: it waits for its first slots, and then trains where the Brain says.

Nothing is started before the first grant. If the Brain is away meanwhile, a job with
`--brain-fallback` trains on hosts of its own.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from elastic_driver.brain.documents import Kind
from elastic_driver.errors import ClusterError, ExitCode, UsageError
from elastic_driver.runtime.brain_link import ANSWER_S, BrainLink
from elastic_driver.runtime.brain_report import BrainReports
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.journal.resume import ResumedRun
from elastic_driver.runtime.journal.store import JournalStore
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir, default_state_dir
from launcher.launch.plan import LaunchPlan
from launcher.launch.submit import ended_by_signals, submit
from launcher.network import is_loopback
from rendezvous.auth import job_token, read_credentials
from rendezvous.client import RendezvousClient
from rendezvous.errors import TokenError

BRAIN_FOLDER = "elastic-brain"  # beside the folder of all runs
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
    brain, granted = _reports(plan, run, say), None
    try:
        if run is not None:
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
    link, patience = brain.link, plan.settings.start_timeout
    link.update(brain.first(plan.settings.min_np, plan.settings.max_np))
    with ended_by_signals("the wait for the Brain"):
        grant = link.first_grant(patience)
    if grant is not None:
        return tuple(grant.hosts.items())
    if link.answers:
        raise ClusterError(
            f"the Brain at {link.url} granted no slots within {patience:g} s; raise "
            "--start-timeout, or lower --min-np"
        )
    if plan.fallback is None:
        raise ClusterError(
            f"the Brain at {link.url} did not answer within {patience:g} s; start it, raise "
            "--start-timeout, or add --brain-fallback"
        )
    say(f"the Brain at {link.url} is away: the job trains on its own hosts, with --auto-scale")
    return None


def _reports(plan: LaunchPlan, run: ResumedRun | None, say: Callable[[str], None]) -> BrainReports:
    """Return what reports the job to the Brain; raises UsageError if that cannot work."""
    settings, spec, options = plan.settings, plan.spec, plan.options
    client = brain_client(str(options.brain), options.brain_token_file, spec.run_id)
    began = time.time() if run is None else run.job.limits.began
    silence = max(spec.driver_timeout, settings.heartbeat_timeout)
    command = hashlib.sha256("\0".join(spec.command).encode()).hexdigest()
    return BrainReports(
        link=BrainLink(client, spec.run_id, say),
        began=began,
        weight=options.weight,
        kind=Kind(name=spec.run_id, command=command),
        lives_on=silence + settings.grace_period + settings.stop_grace,
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
