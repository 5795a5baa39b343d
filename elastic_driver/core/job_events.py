"""Every event for the job, in the groups that its rules take in, and batches of events."""

from typing import TypeAlias, get_args

from elastic_driver.core import driver_events as seen
from elastic_driver.core import events

ProcessEvent: TypeAlias = (
    events.WorkerStarted
    | events.WorkerReady
    | events.WorkerStepped
    | events.WorkerStalled
    | events.WorkerResumed
    | events.WorkerEnding
    | events.WorkerExited
)  # every WorkerReport
AnyAgentEvent: TypeAlias = (
    events.AgentReady
    | events.AgentReturned
    | events.HostLeaving
    | events.ConnectionUnanswered
    | seen.AgentLost
    | seen.AgentSuspected
    | seen.AgentHeard
    | seen.AgentProbed
)  # every AgentEvent
OtherEvent: TypeAlias = (
    events.WorkerLeaving
    | events.WorkerStack
    | events.WorkerSaved
    | events.ScaleRequested
    | events.PlanApplied
    | events.DrainRequested
    | events.DrainCancelled
    | events.StacksRequested
    | seen.DriverResumed
    | seen.StopRequested
    | seen.JobLeaving
    | seen.HostsDiscovered
    | seen.HostsGranted
    | seen.DiscoveryFailed
    | seen.HostsMeasured
    | seen.HostProbed
    | seen.LeaseExpired
    | seen.ProgressReported
    | seen.SizeProposed
    | seen.MemoryExpected
    | seen.HostStarved
    | seen.RankSlow
    | seen.RankRecovered
    | seen.StatesEqual
    | seen.StatesDiffer
    | seen.HostsChecked
    | seen.Tick
)
# Every event for the job; mypy reports one that no rule takes in (`core/job.py`).
JobEvent: TypeAlias = ProcessEvent | AnyAgentEvent | OtherEvent

Together: TypeAlias = (
    events.ManyReports | seen.AgentLost | seen.AgentSuspected | seen.AgentHeard | seen.AgentProbed
)
# Events that come from all workers or hosts at about the same time.
TOGETHER: tuple[type[Together], ...] = get_args(Together)


class EventBatch(events.Event, frozen=True, tag="event_batch"):
    """Events of kinds in `TOGETHER`, handled as one, because re-evaluation is O(workers)."""

    events: tuple[Together, ...]
