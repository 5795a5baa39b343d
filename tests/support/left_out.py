"""A pytest plugin: it lists the skipped tests at the end, and fails the run where none is allowed.

`ELASTIC_TEST_REQUIRE=all` requires every part that tests can use: each skip whose reason is not in
`ALLOWED` fails the run with exit status 1. Continuous integration sets it; see docs/testing.md.
It counts in the process that collects the reports, so it works under pytest-xdist too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass

import pytest

VARIABLE = "ELASTIC_TEST_REQUIRE"
INSTALLER = "tests/install-parts.sh"

# Reasons for which a test may be skipped although all parts are required, each with its own.
ALLOWED = {
    r"no NVIDIA GPU is visible": "few machines have one; `make test-gpu` runs these tests there",
    r"torch is built without (CUDA|NCCL)": "the pinned build of torch is for processors",
    r"make page has not installed": "another test compares the digest of the sources everywhere",
    r"CUDA is in use in this process": "an earlier test of the same process has used the GPU",
}


@dataclass(frozen=True)
class Skip:
    """A test, or a file of tests, that was skipped."""

    test: str
    reason: str

    @property
    def allowed(self) -> bool:
        """Return whether it may be skipped where all parts are required."""
        return any(re.match(pattern, self.reason) for pattern in ALLOWED)


class LeftOut:
    """Collect the skips of a session, report them, and judge them."""

    def __init__(self, required: bool) -> None:
        self._required = required
        self._skips: list[Skip] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a skipped test; an expected failure is none."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that was skipped as a whole."""
        if report.skipped:
            self._record(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which a required part was missing."""
        if self._missing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests were left out for which reason."""
        if not self._skips:
            return
        terminalreporter.section("tests that were left out")
        for reason, count in sorted(Counter(skip.reason for skip in self._skips).items()):
            terminalreporter.line(f"{count:4d}  {reason}")
        missing = self._missing()
        if missing:
            terminalreporter.section(f"missing, although {VARIABLE}=all", red=True)
            for skip in missing:
                terminalreporter.line(f"{skip.test}: {skip.reason}", red=True)
        if not all(skip.allowed for skip in self._skips):
            terminalreporter.line(f"{INSTALLER}, run as root, installs what is missing.")

    def _missing(self) -> list[Skip]:
        return [skip for skip in self._skips if self._required and not skip.allowed]

    def _record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self._skips.append(Skip(report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, but not in the worker processes of pytest-xdist."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "all"):
        raise pytest.UsageError(f"{VARIABLE} is {wish!r}; it is 'all' or not set")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut(required=wish == "all"), "elastic-left-out")
