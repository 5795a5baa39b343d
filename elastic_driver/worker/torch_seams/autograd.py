"""Backward passes, and the hooks of optimizers."""

import torch
from torch.optim import Optimizer

# Call a function once at the end of this backward pass; in the order of these requests.
when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback
_number = getattr(torch._C, "_current_graph_task_id", None)


def number_of_pass() -> int:
    """Return the number of the backward pass that runs on this thread; −1: none does."""
    return -1 if _number is None else int(_number())


def calls_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch's constructor has made this optimizer, so that it has hooks to call."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")
