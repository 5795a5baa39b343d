"""A node check's task without torch, on nodes that may have troubles.

`TROUBLES` is JSON, host → what is wrong: broken (raises at once), dies (killed by a signal),
hangs (never joins), silent (ends without a result), nonsense (writes no TaskResult), slow, and
slow-and-stays (it does its further tasks in the same process, like the real one).
Like the real task it meets its partners first, and waits for them as long as it may.
"""

from __future__ import annotations

import json
import os
import signal
import threading

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.features.checks.messages import (
    Assignment,
    TaskEnded,
    TaskResult,
    assignment_key,
    result_key,
)
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient

PATIENCE_S = 60.0


def main() -> None:
    env = os.environ
    trouble = json.loads(env["TROUBLES"]).get(env[contract.HOSTNAME], "")
    if trouble == "broken":
        raise RuntimeError("the device fell off the bus")
    if trouble == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "hangs":
        threading.Event().wait()
    token, worker = read_token_file(env[contract.TOKEN_FILE]), env[contract.WORKER_ID]
    given = Assignment(
        task=int(env[contract.ROUND]), rank=int(env["RANK"]), size=int(env["WORLD_SIZE"]), node=0
    )
    with RendezvousClient(env[contract.RENDEZVOUS], token) as client:
        play(client, worker, given, trouble)
        number = 0
        while trouble == "slow-and-stays":
            number += 1
            ended = msgspec.json.encode(TaskEnded(worker, given.task))
            client.post_json(EVENTS_PATH, ended)
            entry = client.get(assignment_key(worker, number), wait=PATIENCE_S)
            assert entry is not None
            given = msgspec.json.decode(entry.value, type=Assignment)
            play(client, worker, given, trouble)


def play(client: RendezvousClient, worker: str, given: Assignment, trouble: str) -> None:
    """Meet the partners of a task, and write a result."""
    met = contract.round_prefix(given.task) + "met/"
    client.set(f"{met}{given.rank}", str(os.getpid()).encode())
    for rank in range(given.size):
        assert client.get(f"{met}{rank}", wait=PATIENCE_S) is not None
    if trouble == "silent":
        return
    seconds = 6.0 if trouble.startswith("slow") else 1.0
    result = msgspec.json.encode(TaskResult(seconds, 0.5))
    written = b"[]" if trouble == "nonsense" else result
    client.set(result_key(given.task, worker), written)


if __name__ == "__main__":
    main()
