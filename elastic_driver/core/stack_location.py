"""The place of a thread, found by the file of its innermost Python frame.

`worker.heartbeat.stall_watch` asks for its own training thread, the agent for a thread that py-spy
sees from outside. Pure.
"""

# Parts of paths: code in these files waits for peers (torch, and our own exchanges).
_WAITS_IN = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/",
    *("/torch/accelerator/", "/torch/cuda/", "/torch/xpu/", "/torch_npu/"),
    "/elastic_driver/worker/",
)

# The agent's answers for a worker that does not answer itself.
SEEN_WAITING = "in a collective, seen by py-spy"
SEEN_ELSEWHERE = "outside of collectives, seen by py-spy"


def waits_for_peers(filename: str) -> bool:
    """Return whether a thread whose innermost frame is in this file waits for peers.

    A script that calls `wait()` of a torch work object itself seems to wait elsewhere.
    """
    return any(part in filename for part in _WAITS_IN)
