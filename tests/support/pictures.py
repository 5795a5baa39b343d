"""Status documents of jobs that are well, of any size."""

from __future__ import annotations

from typing import Any

PER_HOST = 8


def status_of_size(size: int, per_host: int = PER_HOST) -> dict[str, Any]:
    """Return the status of a job with so many workers, as JSON has it."""
    members = [
        {
            "worker": f"h{n // per_host}.{n % per_host}.1",
            "host": f"h{n // per_host}",
            "slot": n % per_host,
            "rank": n,
            "state": "running",
            "pid": 1000 + n,
            "version": 5,
            "leaving": "",
        }
        for n in range(size)
    ]
    hosts = [
        {
            "host": f"h{n}",
            "slots": per_host,
            "state": "usable",
            "cooldown_left": 0.0,
            "reason": "",
            "agent": "ready",
            "agent_incarnation": 1,
            "workers": min(per_host, size - n * per_host),
        }
        for n in range(-(-size // per_host))
    ]
    workers = {m["worker"]: {"step": 7, "steps_per_s": 2.0, "cpu": 0.5} for m in members}
    return {
        "run_id": "a-run",
        "endpoint": "http://127.0.0.1:1",
        "started": 1000.0,
        "command": ["python", "train.py"],
        "state": "running",
        "kind": "elastic",
        "reason": "",
        "exit_code": None,
        "round": 3,
        "round_state": "complete",
        "wanted": None,
        "max_np": None,
        "ignored": "",
        "size": size,
        "min_np": 1,
        "members": members,
        "hosts": hosts,
        "counters": {
            "failures": 1,
            "max_restarts": None,
            "fruitless": 0,
            "fruitless_restarts": 3,
            "resets": 2,
            "reset_limit": None,
            "restart_count": 1,
            "ignored_events": 0,
        },
        "measured": {"step": 7, "workers": workers},
        "goodput": {"seconds": {"training": 9.0}, "goodput": 1.0, "slots": 2.0, "wall": 4.5},
    }
