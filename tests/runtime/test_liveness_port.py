"""The port that shows whether a driver lives."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from elastic_driver.reachability import probe
from elastic_driver.runtime.liveness_port import LivenessPort
from tests.support.job import ROOT

PROCESS = """
from elastic_driver.runtime.liveness_port import LivenessPort
import sys
liveness = LivenessPort("127.0.0.1", 1)
liveness.open()
print(liveness.address, flush=True)
sys.stdin.read()
"""


def look(address: str) -> str:
    host, _, port = address.rpartition(":")
    return asyncio.run(probe(host, int(port), 5.0))


def test_a_process_that_is_stopped_answers_and_one_that_was_killed_is_refused() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert look(address) == "answered"
        process.send_signal(signal.SIGSTOP)
        assert look(address) == "answered"
        process.kill()
        process.wait(10)
        assert look(address) == "refused"


def test_those_who_have_looked_make_room_for_others_and_a_closed_port_refuses() -> None:
    liveness = LivenessPort("127.0.0.1", 1)
    assert liveness.address == ""
    liveness.open()
    address = liveness.address
    for _ in range(100):  # many more than may wait
        assert look(address) == "answered"
        liveness.hang_up()
    liveness.open()
    assert liveness.address == address, "open is done once"
    liveness.close()
    assert (liveness.address, look(address)) == ("", "refused")


def test_without_a_way_to_the_other_machine_there_is_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_name(*_: object, **__: object) -> None:
        raise OSError("no such name")

    liveness = LivenessPort("brain.invalid", 1)
    monkeypatch.setattr("socket.getaddrinfo", no_name)
    liveness.open()
    liveness.hang_up()
    assert liveness.address == ""
    monkeypatch.undo()
    liveness._towards = "127.0.0.1"
    liveness.open()
    assert liveness.address
    liveness.close()
