"""Print the processor time of a commit, and of a deep copy of the same state, in seconds."""

import copy
import json
import statistics
import time
from collections.abc import Callable

import torch

import elastic_driver.horovod.torch as hvd

TIMES = 9


def seconds(of: Callable[[], object]) -> float:
    """Return the median processor time of a call."""
    found = []
    for _ in range(TIMES):
        began = time.process_time()
        of()
        found.append(time.process_time() - began)
    return statistics.median(found)


def main() -> None:
    """Train one step, so that the optimizer has a state, and measure."""
    torch.set_num_threads(1)  # as workers of one host have it
    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    state = hvd.elastic.TorchState(model, optimizer)
    of_commit = seconds(state.save)
    of_copy = seconds(
        lambda: (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
    )
    print(json.dumps([of_commit, of_copy]))
    hvd.shutdown()


if __name__ == "__main__":
    main()
