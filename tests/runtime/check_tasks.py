"""A node check's task without torch, on nodes that may have troubles.

`TROUBLES` is JSON, host → what is wrong: broken (raises at once), dies (killed by a signal),
hangs (never joins), silent (ends without a result), nonsense (writes no TaskResult), slow.
Like the real task it meets its partners first, and waits for them as long as it may.
"""

from __future__ import annotations

import json
import os
import signal
import threading

import msgspec

from elastic_driver import contract
from elastic_driver.core.checks.messages import TaskResult, result_key
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
    task, size = int(env[contract.ROUND]), int(env["WORLD_SIZE"])
    token = read_token_file(env[contract.TOKEN_FILE])
    with RendezvousClient(env[contract.RENDEZVOUS], token) as client:
        met = contract.round_prefix(task) + "met/"
        client.set(met + env["RANK"], b"")
        for rank in range(size):
            assert client.get(f"{met}{rank}", wait=PATIENCE_S) is not None
        if trouble == "silent":
            return
        seconds = 6.0 if trouble == "slow" else 1.0
        result = msgspec.json.encode(TaskResult(seconds, 0.5))
        written = b"[]" if trouble == "nonsense" else result
        client.set(result_key(task, env[contract.WORKER_ID]), written)


if __name__ == "__main__":
    main()
