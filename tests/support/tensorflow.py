"""A Python that has TensorFlow: `ELASTIC_TEST_TENSORFLOW` names one, else our own is tried.

TensorFlow is large and wants versions of its own, so it need not be where the tests run:

    python3 -m venv /opt/tensorflow
    /opt/tensorflow/bin/pip install tensorflow-cpu tf-keras scikit-learn
    ELASTIC_TEST_TENSORFLOW=/opt/tensorflow/bin/python make test TESTS=tests/e2e/test_tensorflow.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

VARIABLE = "ELASTIC_TEST_TENSORFLOW"
_NEEDED = ("tensorflow", "tf_keras", "sklearn")


def tensorflow_python() -> str:
    """The interpreter's path; skips the test, with the reason, where there is none."""
    named = os.environ.get(VARIABLE)
    if named is None:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            pytest.skip(f"no {', '.join(missing)} here; {VARIABLE} may name a Python that has them")
        return sys.executable
    look = f"from importlib.util import find_spec as f; print(*[n for n in {_NEEDED} if not f(n)])"
    found = subprocess.run([named, "-c", look], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "", f"{named} has no {found.stdout.strip()}"
    return named
