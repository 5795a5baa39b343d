"""What a look at the address of a driver shows."""

from __future__ import annotations

import asyncio
import socket

import pytest

from elastic_driver.brain.messages import DriverProbed, ProbeDriver
from launcher.brain import probes
from launcher.brain.probes import answer_probe


def look(liveness: str) -> str:
    found: list[DriverProbed] = []
    asyncio.run(answer_probe(ProbeDriver("j", 5.0, liveness, "a test wants to know"), found.append))
    ((answer),) = found
    assert (answer.job, answer.began, answer.liveness) == ("j", 5.0, liveness)
    return answer.result


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_driver_that_listens_answers_and_one_that_has_ended_is_refused(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    liveness = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert look(liveness) == "answered"
    listener.close()
    assert look(liveness) == "refused"


@pytest.mark.parametrize("liveness", ["", "nonsense", "127.0.0.1:x", "host:80", "127.0.0.1:99999"])
def test_what_is_no_address_shows_nothing(liveness: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PATIENCE_S", 0.1)
    assert look(liveness) == "silent"
