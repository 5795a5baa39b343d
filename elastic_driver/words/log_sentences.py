"""Sentences about the lines of the event log, for the terminal and for `elasticctl events`. Pure.

An event that no class stands for, of a newer driver perhaps, is shown by its name.
"""

from collections.abc import Mapping
from typing import Any

from elastic_driver.errors import ExitCode
from elastic_driver.kernel.log import name_of
from elastic_driver.words import counted
from elastic_driver.words.log_events import JobFailed
from elastic_driver.words.log_lines import KINDS


def sentence(event: str, reason: str, facts: Mapping[str, Any]) -> str:
    """Return an event of the log in one sentence; `facts`: the fields of its line."""
    about = facts.get("worker") or facts.get("host") or ""
    kind = KINDS.get(event)
    words = f"{event.replace('_', ' ')} {about}".rstrip() if kind is None else kind.sentence
    known = dict.fromkeys(("host", "worker", "rank", "round", "step"), "?")
    known.update({name: fact for name, fact in facts.items() if fact is not None})
    known["worker"] = name_worker(facts.get("worker"), facts.get("host")) or "?"
    rank = facts.get("rank")
    if facts.get("worker") and isinstance(rank, int) and rank >= 0:
        known["worker"] = f"{facts['worker']} (rank {rank})"
    if event == name_of(JobFailed) and told_to_stop(facts):
        words = "the job was stopped"
    text = words.format_map({**known, "world": describe_world(facts)}).removesuffix(": ")
    return f"{text}: {reason}" if reason else text


def name_worker(worker: str | None, host: str | None) -> str:
    """Return what a sentence calls a worker; by its host if only that is known."""
    return worker or (f"of host {host}" if host else "")


def told_to_stop(facts: Mapping[str, Any]) -> bool:
    """Return whether these facts of a job's end say that it was told to stop, and did not fail."""
    stopped = facts.get("exit_code") in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
    return stopped and facts.get("first_failure") is None


def describe_world(facts: Mapping[str, Any]) -> str:
    """Return `3 workers on 2 hosts`, without a number that the event lacks."""
    counts = {"worker": facts.get("size"), "host": facts.get("hosts")}
    parts = [counted(n, noun) for noun, n in counts.items() if n is not None]
    return " on ".join(parts)
