"""The features' tests start drivers, too."""

from __future__ import annotations

from tests.runtime.conftest import start_job

__all__ = ["start_job"]
