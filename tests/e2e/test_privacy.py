"""A job whose terminal nobody reads trains on, and nothing of it that others can read has a secret.

Files, command lines, environments, the terminal and `elasticctl`, while malformed requests come in.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from elastic_driver.runtime.run_dir import read_endpoint
from elastic_driver.token_roles import agent_token, worker_token
from rendezvous.auth import read_token_file
from tests.e2e.test_control import ctl, here
from tests.support.job import JOBS, RunningJob, elasticrun

ARGUMENT, VARIABLE = "open-sesame-4711", "alibaba-4712"


def test_an_unread_terminal_and_hostile_requests_stop_no_job_and_show_no_secret() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb", buffering=0) as terminal, open(writing, "wb", buffering=0) as stderr:
        while stderr.write(b"." * 4096):  # the pipe is full, and nobody reads it
            pass
        os.set_blocking(writing, True)
        args = ("-np", "2", "-v", "--env", f"HUB_TOKEN={VARIABLE}", "--", str(JOBS / "train.py"))
        args = (*args, "--api-key", ARGUMENT)
        env = {"STEPS": "100000"}
        with elasticrun(*args, env=env, stderr=stderr.fileno()) as job:
            job.until_size(2)
            tokens = [file.read_text().split()[0] for file in job.run_dir.glob("token*")]
            tokens.append(token := read_token_file(job.run_dir / "token"))
            tokens.append(agent := agent_token(token, "localhost"))
            tokens += [worker_token(agent, record.worker) for record in job.live().values()]
            for _ in range(100):
                malformed(job, token)
            victim = next(iter(job.live()))
            os.kill(victim, signal.SIGKILL)
            job.until(lambda: len(job.rounds()) == 2, "another round is complete")
            job.until_size(2)
            shown = ctl("status", "--json", *here(job)) + ctl("events", *here(job))
            assert ARGUMENT not in shown
            for place, content in everything(job):
                shown_here = [each for each in tokens if each.encode() in content]
                assert not shown_here, place
                if place.startswith("/"):  # the user's own command line has it
                    assert VARIABLE.encode() not in content, place
            ctl("stop", *here(job))
            assert job.process.wait(60) == 143
        stderr.close()
        said = terminal.read(1 << 20) or b""
        while more := terminal.read(1 << 20):
            said += more
    assert not any(token.encode() in said for token in tokens)
    assert ARGUMENT.encode() not in said


def malformed(job: RunningJob, token: str) -> None:
    """Send a request that no parser takes, with a token in it."""
    place = urlsplit(read_endpoint(job.run_dir).url)
    with socket.create_connection((place.hostname, place.port), timeout=30.0) as connection:
        head = f"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer {token}\x01\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 400 " in connection.recv(65536)


def everything(job: RunningJob) -> Iterator[tuple[str, bytes]]:
    """Yield what others may see of a job: its files but those of tokens, and its processes."""
    for path in job.folder.rglob("*"):
        if path.is_file() and not path.name.startswith("token"):
            yield str(path), path.read_bytes()
    for process in job.processes():
        for name in ("cmdline", "environ"):
            try:
                yield f"{name} of {process}", Path(f"/proc/{process.pid}/{name}").read_bytes()
            except (OSError, psutil.Error):  # it has just ended
                continue
