"""Every run ends with a list of the tests that were left out."""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.support.left_out import pytest_configure

__all__ = ["pytest_configure"]

# A shell ignores SIGINT for what it starts in the background, and nohup ignores SIGHUP. Processes
# of tests would inherit that: no test of these signals could pass there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# hypothesis tries the same examples in each run, so that what fails here fails again anywhere.
# `make nightly` tries others each time.
settings.register_profile("the same each time", derandomize=True, deadline=None)
settings.load_profile("the same each time")
