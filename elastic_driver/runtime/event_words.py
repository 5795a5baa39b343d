"""Sentences about the events of the log, for the terminal and for `elasticctl events`. Pure.

`WORDS` has every event that is announced; a test compares it with the source. An event that it
lacks, of a newer driver perhaps, is shown by its name.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from elastic_driver.errors import ExitCode
from elastic_driver.words import counted


class Level(IntEnum):
    """The amount of output: -q, default, -v."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


# The event's name → the lowest level that shows it, and its sentence.
WORDS: dict[str, tuple[Level, str]] = {
    "job_started": (Level.VERBOSE, "the job has started"),
    "host_discovered": (Level.VERBOSE, "host {host} was discovered"),
    "host_removed": (Level.NORMAL, "host {host} removed"),
    "host_check_started": (Level.VERBOSE, "hosts are checked before they get workers"),
    "host_checked": (Level.VERBOSE, "host {host} was checked"),
    "host_blacklisted": (Level.QUIET, "host {host} in cool-down"),
    "host_refused": (Level.QUIET, "host {host} cannot be used"),
    "host_unreachable": (Level.NORMAL, "host {host} is not used for now"),
    "host_still_away": (Level.NORMAL, "host {host} does not answer yet"),
    "drain_requested": (Level.NORMAL, "host {host} is drained"),
    "worker_leaving": (Level.NORMAL, "worker {worker} has to go"),
    "drain_cancelled": (Level.NORMAL, "host {host} may be used again"),
    "host_drained": (Level.NORMAL, "host {host} is empty"),
    "memory_expected": (Level.NORMAL, "similar jobs say what memory a worker needs"),
    "host_starved": (Level.NORMAL, "host {host} has fewer processors than its workers need"),
    "host_resurrected": (Level.NORMAL, "host {host} may be used again"),
    "discovery_failed": (Level.QUIET, "discovery failed, the last known hosts stay"),
    "job_waits": (Level.NORMAL, "the job waits"),
    "connection_unanswered": (Level.QUIET, "worker {worker} reaches a host not"),
    "probe_unanswered": (Level.NORMAL, "host {host} answers no probe"),
    "agent_started": (Level.VERBOSE, "agent on {host} is up"),
    "agent_suspected": (Level.VERBOSE, "agent on {host} may be lost"),
    "agent_cleared": (Level.VERBOSE, "agent on {host} lives"),
    "agent_lost": (Level.NORMAL, "agent on {host} lost"),
    "agent_returned": (Level.VERBOSE, "agent on {host} has returned"),
    "driver_resumed": (Level.NORMAL, "another driver goes on with the job"),
    "worker_started": (Level.VERBOSE, "worker {worker} started"),
    "worker_ready": (Level.VERBOSE, "worker {worker} is ready"),
    "spare_ready": (Level.VERBOSE, "spare {worker} is ready"),
    "spare_promoted": (Level.NORMAL, "spare {worker} takes over"),
    "spares_unused": (Level.NORMAL, "no spares are kept"),
    "worker_left": (Level.VERBOSE, "the script of worker {worker} is over"),
    "worker_exited": (Level.VERBOSE, "worker {worker} exited"),
    "worker_lost": (Level.NORMAL, "worker {worker} lost"),
    "out_of_memory": (Level.NORMAL, "worker {worker} ran out of memory"),
    "worker_hung": (Level.NORMAL, "worker {worker} hangs"),
    "worker_stalled": (Level.NORMAL, "worker {worker} stands still"),
    "worker_resumed": (Level.NORMAL, "worker {worker} goes on"),
    "worker_result": (Level.VERBOSE, "worker {worker} has ended"),
    "collectives_differ": (Level.QUIET, "the ranks wait in collectives that do not match"),
    "finished_alone": (Level.QUIET, "worker {worker} has finished its script before the others"),
    "stacks_collected": (Level.VERBOSE, "the stacks of the workers were collected"),
    "boundary_overdue": (Level.VERBOSE, "a planned change waits for the workers"),
    "rank_slow": (Level.NORMAL, "rank {rank} on {host} holds the others up"),
    "rank_recovered": (Level.NORMAL, "rank {rank} on {host} has recovered"),
    "replacement_started": (Level.NORMAL, "rank {rank} on {host} is slow and will be replaced"),
    "replacement_abandoned": (Level.NORMAL, "worker {worker} stays"),
    "worker_replaced": (Level.NORMAL, "worker {worker} was replaced"),
    "worker_unfit": (Level.QUIET, "worker {worker} cannot take over the state"),
    "worker_not_replaced": (Level.NORMAL, "worker {worker} is not replaced"),
    "state_differs": (Level.QUIET, "the ranks hold different states after step {step}"),
    "commits_differ": (Level.QUIET, "the ranks do not commit alike"),
    "work_moved": (Level.NORMAL, "work is shared anew"),
    "shard_quarantined": (Level.QUIET, "a data shard is in quarantine"),
    "nodes_checked": (Level.VERBOSE, "nodes were checked"),
    "round_opened": (Level.VERBOSE, "round {round} is opened"),
    "processes_started": (Level.NORMAL, "round {round}: {world}"),
    "round_completed": (Level.NORMAL, "round {round} complete: {world}"),
    "round_closed": (Level.VERBOSE, "round {round} is closed"),
    "job_leaving": (Level.NORMAL, "the job is to end"),
    "state_saved": (Level.NORMAL, "last checkpoint written"),
    "state_not_saved": (Level.NORMAL, "no last checkpoint"),
    "state_lost": (Level.QUIET, "the state of step {step} or later is lost"),
    "state_kept": (Level.QUIET, "the last holder of the state stays"),
    "state_synced": (Level.VERBOSE, "state synced in round {round}"),
    "steps_redone": (Level.VERBOSE, "the steps that were lost are trained again"),
    "key_not_kept": (Level.VERBOSE, "a key of the store is not in the journal"),
    "journal_failed": (Level.QUIET, "the journal has failed"),
    "journal_late": (Level.NORMAL, "the journal is late"),
    "journal_unreachable": (Level.NORMAL, "the journal cannot be reached"),
    "journal_reachable": (Level.NORMAL, "the journal is back"),
    "journal_caught_up": (Level.NORMAL, "the journal is complete again"),
    "grace_period_passed": (Level.NORMAL, "some ranks have not ended"),
    "scale_requested": (Level.NORMAL, "another size was requested"),
    "plan_applied": (Level.NORMAL, "a plan is carried out"),
    "hosts_granted": (Level.NORMAL, "the Brain grants the job's slots anew"),
    "size_proposed": (Level.NORMAL, "another size is tried"),
    "size_found": (Level.NORMAL, "the best size is found"),
    "prior_dropped": (Level.NORMAL, "what similar jobs have measured does not fit this one"),
    "size_search_reopened": (Level.NORMAL, "the best size is searched anew"),
    "job_succeeded": (Level.NORMAL, "the job has succeeded"),
    "job_failed": (Level.NORMAL, "the job has failed"),
}

# Events that say that training goes wrong: red on a terminal.
ALARMS = frozenset(
    (
        *("state_differs", "state_lost", "commits_differ", "collectives_differ"),
        *("finished_alone", "worker_unfit"),
    )
)


def sentence(event: str, reason: str, facts: Mapping[str, Any]) -> str:
    """Return an event of the log in one sentence; `facts`: the fields of its line."""
    about = facts.get("worker") or facts.get("host") or ""
    words = WORDS.get(event, (Level.VERBOSE, f"{event.replace('_', ' ')} {about}".rstrip()))[1]
    known = dict.fromkeys(("host", "worker", "rank", "round", "step"), "?")
    known.update({name: fact for name, fact in facts.items() if fact is not None})
    rank = facts.get("rank")
    if facts.get("worker") and isinstance(rank, int) and rank >= 0:
        known["worker"] = f"{facts['worker']} (rank {rank})"
    if event == "job_failed" and told_to_stop(facts):
        words = "the job was stopped"
    text = words.format_map({**known, "world": describe_world(facts)}).removesuffix(": ")
    return f"{text}: {reason}" if reason else text


def told_to_stop(facts: Mapping[str, Any]) -> bool:
    """Return whether these facts of a job's end say that it was told to stop, and did not fail."""
    stopped = facts.get("exit_code") in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
    return stopped and facts.get("first_failure") is None


def describe_world(facts: Mapping[str, Any]) -> str:
    """Return `3 workers on 2 hosts`, without a number that the event lacks."""
    counts = {"worker": facts.get("size"), "host": facts.get("hosts")}
    parts = [counted(n, noun) for noun, n in counts.items() if n is not None]
    return " on ".join(parts)
