"""Real processes that form one gloo group and answer the same question again and again.

`gloo.run_ranks` starts processes for one call. Tests that try hundreds of examples keep theirs: two
ranks that are started once take some milliseconds for an example.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 30.0


class Ranks:
    """`size` processes that each run `function(rank, size, item)` for every item that is asked.

    An item on which a rank fails, or takes longer than the limit, costs the processes: the next
    item has new ones.
    """

    def __init__(self, size: int, function: Callable[[int, int, Any], Any], folder: Path) -> None:
        self.size, self._function, self._folder = size, function, folder
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def ask(self, item: Any) -> list[Any]:
        """What the function returns on each rank; raises `AssertionError` where one fails."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(item)
        answers = []
        try:
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(LIMIT_S):
                    raise AssertionError(f"rank {rank} has not answered after {LIMIT_S} s")
                answer, trouble = pipe.recv()
                assert not trouble, f"rank {rank} failed:\n{trouble}"
                answers.append(answer)
        except BaseException:
            self.close()
            raise
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo"])
        store = self._folder / f"store-{os.urandom(4).hex()}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, str(store), rank, self.size, self._function)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(
    pipe: multiprocessing.connection.Connection,
    store: str,
    rank: int,
    size: int,
    function: Callable[[int, int, Any], Any],
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit
    )
    with contextlib.suppress(EOFError, OSError):  # the test has closed its end
        while True:
            item = pipe.recv()
            try:
                pipe.send((function(rank, size, item), ""))
            except BaseException:
                pipe.send((None, traceback.format_exc()))
                return
