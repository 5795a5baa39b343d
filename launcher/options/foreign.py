"""Options of torchrun and horovodrun that people will try, and what to do instead."""

from __future__ import annotations

FOREIGN: dict[str, str] = {
    "--rdzv-conf": "use --start-timeout, --elastic-timeout and --last-call",
    "--monitor-interval": "not needed: a worker's end is noticed at once",
    "--no-python": "not needed: a COMMAND that does not end in .py is run as it is",
    "--gloo": "not needed: the script chooses, elastic.init(backend='gloo')",
    "--mpi": "use --backend mpi",
    "--start-method": "not needed: workers are separate programs",
    "--role": "not needed: all workers have the same role",
    "--blacklist": "use --host-failures and --blacklist-cooldown-range",
}
