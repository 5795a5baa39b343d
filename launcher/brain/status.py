"""The document of the Brain's `GET /v1/status`: hosts and jobs, who has which slots, and why."""

import msgspec

from elastic_driver.brain.cluster import Cluster
from elastic_driver.brain.jobs import Job


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
