"""Runs a function in several real processes that form a gloo group, and collects what it returns.

Processes come from a fork server that has imported torch once, so eight of them start in well
under a second. Every wait has a deadline; whatever still runs at the end is killed.
"""

from __future__ import annotations

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

_LIMIT_S = 90.0
_WORDS_S = 5.0  # for the other ranks to say what is wrong, once one has failed


def run_ranks(size: int, function: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """`function(rank, size, *args)` on `size` ranks of one group; their results by rank.

    Raises `AssertionError` with what each of them says where a rank failed or took too long: the
    first one often says only that another has gone.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    store = directory / f"store-{size}-{os.urandom(4).hex()}"
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(theirs, str(store), rank, size, function, args)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        patience, answers = _LIMIT_S, list[tuple[Any, str]]()
        for pipe, process in zip(pipes, processes, strict=True):
            answers.append(_receive(pipe, process, patience))
            if answers[-1][1]:  # the others end soon, or wait for this one
                patience = _WORDS_S
        troubles = [f"rank {rank} {said}" for rank, (_, said) in enumerate(answers) if said]
        assert not troubles, "\n".join(troubles)
        return [result for result, _ in answers]
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(
    pipe: multiprocessing.connection.Connection,
    process: multiprocessing.process.BaseProcess,
    patience: float,
) -> tuple[Any, str]:
    """What a rank has returned, and what is wrong with it."""
    if not pipe.poll(patience):
        return None, f"has not returned within {patience:g} s"
    try:
        result, trouble = pipe.recv()
    except EOFError:
        process.join(_WORDS_S)
        return None, f"has ended with exit code {process.exitcode} and no word"
    return result, trouble


def _main(
    pipe: multiprocessing.connection.Connection,
    store: str,
    rank: int,
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # A script's own default on Linux; a fork server's child would start another fork server.
    multiprocessing.set_start_method("fork", force=True)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_LIMIT_S),
        )
        result = function(rank, size, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((result, ""))
    except BaseException:
        pipe.send((None, f"failed:\n{traceback.format_exc()}"))
