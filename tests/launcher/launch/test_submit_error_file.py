"""What a scheduler reads that sets TORCHELASTIC_ERROR_FILE, as for torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_driver.runtime.results import JobResult
from elastic_driver.words.findings import Failure
from launcher.launch.submit import ERROR_FILE, write_error_file

TRACE = 'Traceback (most recent call last):\n  File "t.py", line 3\nValueError: boom'
FAILED = JobResult(
    exit_code=3,
    reason="rank 1 on a failed first",
    ended=12.5,
    failure=Failure("a.1.1", 1, "a", 7, 3, f"a line\n{TRACE}\n"),
)


def test_the_first_failure_has_the_form_of_torch_s_record(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "error.json"
    assert write_error_file(FAILED, {ERROR_FILE: str(file)}) == ""
    found = json.loads(file.read_bytes())["message"]
    assert found["message"] == "ValueError: boom"
    assert found["errorCode"] == 3
    assert found["extraInfo"]["py_callstack"] == TRACE
    assert (found["extraInfo"]["rank"], found["extraInfo"]["timestamp"]) == ("1", "12")


def test_a_job_that_ends_without_a_failed_worker_tells_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    write_error_file(JobResult(exit_code=75, reason="no hosts", ended=1.0), {ERROR_FILE: str(file)})
    assert json.loads(file.read_bytes())["message"]["message"] == "no hosts"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link away needs root")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    precious, file = tmp_path / "precious", tmp_path / "error.json"
    precious.write_text("precious")
    file.symlink_to(precious)
    os.chown(file, 12345, 12345, follow_symlinks=False)
    assert "it is a link that user 12345 has made" in write_error_file(
        FAILED, {ERROR_FILE: str(file)}
    )
    assert precious.read_text() == "precious"


def test_nothing_is_written_where_nothing_failed_or_nobody_asks(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    done = JobResult(exit_code=0, reason="done", ended=1.0)
    assert write_error_file(done, {ERROR_FILE: str(file)}) == ""
    assert write_error_file(FAILED, {}) == ""
    assert not file.exists()
    assert "cannot write TORCHELASTIC_ERROR_FILE" in write_error_file(
        FAILED, {ERROR_FILE: str(tmp_path)}
    )
