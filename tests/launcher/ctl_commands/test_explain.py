"""The sentences of `elasticctl explain` and `replay`."""

from __future__ import annotations

import pytest

from elastic_driver.job import decisions as do
from elastic_driver.job.events import (
    AgentProbed,
    EventBatch,
    HostResult,
    HostsChecked,
)
from elastic_driver.job.job import DECLARATION
from elastic_driver.kernel.machine import InWords
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import StopWorkerOrder
from launcher.ctl_commands import explain


@pytest.mark.parametrize("kind", [*DECLARATION.event_types(), *DECLARATION.decision_types()])
def test_each_event_and_decision_has_a_sentence_of_its_own(kind: type[InWords]) -> None:
    assert kind is EventBatch or kind.says or kind.in_words is not InWords.in_words


def test_sentences_say_what_has_happened_and_not_which_fields_there_are() -> None:
    stack = ev.WorkerStack("a.0.1", 1, "in a collective", 'File "t.py", line 7')
    assert explain.of_event(stack) == "a.0.1 was asked for its stack: in a collective"
    probed = AgentProbed("a", 1, 2, "answered", 0.0012)
    assert explain.of_event(probed) == "a probe of agent a.1: answered in 0.001 s"
    checked = HostsChecked((HostResult("a", True, ""), HostResult("b", False, "slow")), 1)
    assert explain.of_event(checked) == "the check of 2 hosts is over; 1 may be used"
    line = do.Announce(worker_log.WorkerStarted(), "pid 7", rank=0, pid=7, worker="a.0.1", cause=1)
    assert explain.of_decision(line) == "worker a.0.1 (rank 0) started: pid 7"
    stop = do.GiveOrder("a", 1, StopWorkerOrder("a.0.1", 5.0, "it leaves"), "it leaves")
    assert explain.of_decision(stop) == "a.0.1 is stopped: it leaves"


def test_a_state_that_was_not_written_is_not_called_written() -> None:
    said = [
        explain.of_event(ev.WorkerSaved("a.0.1", 1, *told))
        for told in (("/ckpt/step-5",), ("", "No space left on device"), ())
    ]
    assert said == [
        "a.0.1 has written the state to disk: /ckpt/step-5",
        "a.0.1 has not written the state to disk: No space left on device",
        "a.0.1 has not written the state to disk: it has no checkpoint_dir",
    ]
