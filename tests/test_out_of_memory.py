"""Outputs of processes that had too little memory are told from all others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_driver.failure_causes import lacks_memory, lost_a_loader

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB"
TORCH_CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 4000 bytes. Error code 12 (Cannot allocate memory)"
)
LOADER = "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (f"epoch 3\n{TRACE}MemoryError\n", "host"),
        (f"{TRACE}MemoryError: 8 GiB\n", "host"),
        (f"{TRACE}numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 TiB\n", "host"),
        (f"[rank1]: {TRACE}[rank1]: MemoryError\n", "host"),
        (f"{TRACE}{TORCH_CPU}\n", "host"),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n", "host"),
        (f"{TRACE}torch.OutOfMemoryError: {CUDA}\n", "device"),
        (f"{TRACE}torch.cuda.OutOfMemoryError: {CUDA}\n", "device"),
        (f"[rank0]: {TRACE}[rank0]: torch.OutOfMemoryError: {CUDA}\n", "device"),
        ("", None),
        (f"{TRACE}ValueError: no MemoryError here\n", None),
        (f"{TRACE}MemoryError\n\nDuring handling:\n{TRACE}KeyError: 'x'\n", None),
        ("MemoryError is what I fear\n", None),
        (f"{TRACE}RuntimeError: you tried to allocate a name twice\n", None),
    ],
)
def test_the_last_exception_decides(tail: str, expected: str | None) -> None:
    assert lacks_memory(tail) == expected


def test_what_python_prints_under_a_limit_of_memory_is_recognised() -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))\n"
        "b = [bytes(2**26) for _ in range(9)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert lacks_memory(done.stderr) == "host"


def test_a_loader_that_was_killed_is_no_proof_by_itself() -> None:
    assert lost_a_loader(f"{TRACE}{LOADER}\n")
    assert lacks_memory(f"{TRACE}{LOADER}\n") is None
    assert not lost_a_loader(f"{TRACE}ValueError: killed by signal: Killed\n")
