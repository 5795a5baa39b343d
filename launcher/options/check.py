"""Options of the node check before training."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import CHECK, Option

NETWORK_CHECK: Option[bool] = Option(
    "network-check",
    kinds.flag(),
    False,
    CHECK,
    "Run short tasks on all hosts in pairs before the job starts; it starts without the faulty "
    "ones.",
)
COMM_PERF_TEST: Option[bool] = Option(
    "comm-perf-test",
    kinds.flag(),
    False,
    CHECK,
    "The same, and show bandwidth and latency of the network.",
)
STRAGGLER_DETECTION: Option[bool] = Option(
    "straggler-detection",
    kinds.flag(),
    False,
    CHECK,
    "The same, train a small transformer too, and name hosts more than twice as slow as usual.",
)
EXCLUDE_STRAGGLER: Option[bool] = Option(
    "exclude-straggler", kinds.flag(), False, CHECK, "The same, and start without the slow ones."
)
CHECK_TIMEOUT: Option[float] = Option(
    "check-timeout",
    kinds.seconds(),
    120.0,
    CHECK,
    "A task that takes longer has failed; also the time for agents to come up for the check.",
)
