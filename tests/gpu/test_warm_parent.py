"""A torch built for CUDA is kept warm without a word to the driver, so that forks may use it.

Needs such a torch and no GPU: who asks the driver for anything makes the CUDA runtime load it, and
the loader tells of that.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.job import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA"),
]

WARM = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import _elastic_warm_worker
print("imported", file=sys.stderr, flush=True)
_elastic_warm_worker.first_step(torch)
print("warm", file=sys.stderr, flush=True)
torch.cuda.is_available()
"""


def test_the_tiny_step_of_the_warm_parent_does_not_reach_for_the_driver() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARM, str(ROOT / "launcher" / "agent" / "warm" / "parent")],
        env={**os.environ, "LD_DEBUG": "files"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    _, _, after_import = done.stderr.partition("\nimported\n")
    step, _, asked = after_import.partition("\nwarm\n")
    assert "libcuda.so" in asked, "whoever asks for a device does reach for it"
    assert "libcuda.so" not in step
