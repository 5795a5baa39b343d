"""The place of a thread, found by the file of its innermost Python frame; its stack, cut to size.

`worker.heartbeat.stall_watch` asks for its own training thread, the agent for a thread that py-spy
sees from outside. Pure.
"""

MAX_STACK_CHARS = 60_000  # below the bound of a report's texts

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


def shorten(stack: str, limit: int = MAX_STACK_CHARS) -> str:
    """Return the innermost part of a stack, at most `limit` characters; it says what is cut."""
    if len(stack) <= limit:
        return stack
    note = f"  (more than {len(stack) - limit} characters of outer frames were cut)\n"
    return note + stack[len(note) - limit :]
