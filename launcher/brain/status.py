"""The document of `GET /v1/status`, and the commands that ask for it and show it.

It has hosts and jobs, who has which slots, and why. `elasticbrain status` and `forget` ask the
Brain of a folder.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from elastic_driver.brain.cluster import Cluster
from elastic_driver.brain.jobs import Job
from elastic_driver.contract import STATUS_PATH
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.words import printable
from launcher.brain.routes import FORGET_PATH
from launcher.brain.setup import BrainFolder
from launcher.ctl_commands.job_text import table
from rendezvous.auth import read_credentials, reader_token
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnreachableError


def is_silent(cluster: Cluster, name: str) -> bool | None:
    """Return whether a job, or a former run of it, is not heard; None: there is no such job."""
    runs = [job for job in cluster.runs() if job.name == name]
    return any(not job.is_live for job in runs) if runs else None


def _state(job: Job) -> str:
    """Return "live", "silent", or "ended" if its workers end by themselves now."""
    if job.is_live:
        return "live"
    return "silent" if job.gone_at is None else "ended"


def status_document(url: str, started: float, cluster: Cluster) -> bytes:
    """Return the status as JSON: all jobs, and former runs that may have processes."""
    jobs = [
        {
            "job": job.name,
            "state": _state(job),
            "watched": job.is_watched,
            "arrived": job.arrived,
            "min": job.report.least,
            "max": job.report.most,
            "weight": job.report.weight,
            "held": job.report.held,
            "granted": job.granted,
            "holding": job.report.holding,
            "grant": job.grants[-1].number if job.grants else 0,
            "carried_out": job.report.carried_out,
            "speeds": [job.speeds.at[key] for key in sorted(job.speeds.at)],
            "reason": job.reason,
        }
        for job in cluster.runs()
    ]
    used = dict.fromkeys(cluster.hosts, 0)
    for job in cluster.runs():
        for host, slots in job.granted.items():
            used[host] = used.get(host, 0) + slots
    hosts = [{"host": h, "slots": cluster.hosts.get(h, 0), "granted": n} for h, n in used.items()]
    document = {
        "url": url,
        "started": started,
        "jobs": jobs,
        "hosts": hosts,
        "measured": sorted(cluster.figures),
    }
    return msgspec.json.encode(document)


ANSWER_S = 5.0


def ask(folder: BrainFolder) -> bytes:
    """Return the status document of the Brain; raises ClusterError if none runs there."""
    with _client(folder, reader_token) as client:
        return client.get_bytes(STATUS_PATH)


def forget(folder: BrainFolder, job: str) -> None:
    """Have the Brain free the slots of a silent job; raises UsageError if it has no such job."""
    with _client(folder, str) as client:
        try:
            client.post_json(FORGET_PATH.format(job=quote(job, safe="")), b"{}")
        except RequestError as error:
            if error.status not in (404, 409):
                raise
            raise UsageError(f"{error.message}; {error.hint}") from error


@contextlib.contextmanager
def _client(folder: BrainFolder, derived: Callable[[str], str]) -> Iterator[RendezvousClient]:
    """Return a client of the Brain of a folder, with a token derived from the administrator's.

    Raises ClusterError if it does not answer.
    """
    if (url := folder.read_endpoint()) is None:
        raise ClusterError(
            f"no Brain runs in {folder.path}; start it (elasticbrain serve), or give its "
            "--state-dir"
        )
    found = read_credentials(folder.admin_token_file)
    token, known_by = derived(found.token), found.fingerprint
    with RendezvousClient(url, token, ANSWER_S, repeats=False, fingerprint=known_by) as client:
        try:
            yield client
        except UnreachableError as error:
            raise ClusterError(
                f"the Brain at {url} does not answer ({error.cause}); start it again with the "
                f"same folder: elasticbrain serve --state-dir {folder.path}"
            ) from error


def render(document: dict[str, Any]) -> str:
    """Return the document as two tables; nothing in them controls a terminal."""
    hosts = [(h["host"], str(h["slots"]), str(h["granted"])) for h in document["hosts"]]
    jobs = [
        (
            job["job"],
            job["state"],
            f"{job['weight']:g}",
            _limits(job),
            str(sum(job["granted"].values())),
            " ".join(f"{host}:{slots}" for host, slots in job["granted"].items()) or "waits",
            _step_times(job["speeds"]),
            job["reason"],
        )
        for job in document["jobs"]
    ]
    parts = [table(("HOST", "SLOTS", "GRANTED"), hosts)]
    head = ("JOB", "STATE", "WEIGHT", "LIMITS", "SLOTS", "WHERE", "STEP TIMES", "WHY")
    return printable("\n\n".join([*parts, table(head, jobs)]))


def _limits(job: dict[str, Any]) -> str:
    """Return the numbers of workers that a job may have: "2 to 8", "2 or more", "4 (held)"."""
    if job["held"] is not None:
        return f"{job['held']} (held)"
    return f"{job['min']} or more" if job["max"] is None else f"{job['min']} to {job['max']}"


def _step_times(speeds: list[dict[str, Any]]) -> str:
    """Return the measured seconds of a step with each number of workers: "2: 0.51, 4: 0.3 s".

    A number that was measured on different numbers of hosts has them, too.
    """
    sizes = [each["size"] for each in speeds]
    where = [f" on {e['hosts']}" if sizes.count(e["size"]) > 1 else "" for e in speeds]
    times = [f"{e['size']}{on}: {e['step_time']:.3g}" for e, on in zip(speeds, where, strict=True)]
    return f"{', '.join(times)} s" if times else "-"
