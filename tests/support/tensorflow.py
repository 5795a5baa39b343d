"""A Python that has TensorFlow, which is large and wants an environment of its own.

`ELASTIC_TEST_TENSORFLOW` names one. Else it is the one that `tests/install-parts.sh` makes, and
else our own where that has TensorFlow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

VARIABLE = "ELASTIC_TEST_TENSORFLOW"
INSTALLED = Path("/opt/elastic-test-parts/tensorflow/bin/python")
_NEEDED = ("tensorflow", "tf_keras", "sklearn")
_LOOK = f"from importlib.util import find_spec as f; print(*[n for n in {_NEEDED} if not f(n)])"


def tensorflow_python() -> str:
    """Return the interpreter's path; skip the test, with the reason, where there is none."""
    named = os.environ.get(VARIABLE) or (str(INSTALLED) if os.access(INSTALLED, os.X_OK) else "")
    if not named:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            pytest.skip(f"no {', '.join(missing)} here; {VARIABLE} may name a Python that has them")
        return sys.executable
    try:
        found = subprocess.run([named, "-c", _LOOK], check=True, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"{VARIABLE} names no Python: {error}")
    assert found.stdout.strip() == "", f"{named} has no {found.stdout.strip()}"
    return named
