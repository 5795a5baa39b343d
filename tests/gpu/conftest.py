"""Runs jobs on one GPU, several workers sharing it; skips where there is none, and says why.

NCCL refuses two ranks on one device of one host, so each worker poses as a host of its own
(NCCL_HOSTID) and they talk over loopback. REHEARSE=1 runs the same tests with gloo on the
processor: that tells whether the tests are right, and nothing about NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.job import RunningJob, elasticrun

JOBS = Path(__file__).parent / "jobs"
ON_CPU = os.environ.get("REHEARSE") == "1"

Run = Callable[..., AbstractContextManager[RunningJob]]


def why_not() -> str:
    """Why these tests cannot run here; empty where they can."""
    if ON_CPU:
        return ""
    if not dist.is_nccl_available():
        return "torch is built without NCCL"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    return ""


@pytest.fixture
def run() -> Run:
    """`elasticrun` with the variables that let its workers share the GPU."""
    env = {
        "DEVICE": "cpu" if ON_CPU else "cuda",
        "BACKEND": "gloo" if ON_CPU else "nccl",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }

    def start(*args: str, **more: str) -> AbstractContextManager[RunningJob]:
        return elasticrun(*args, env={**env, **more})

    return start
