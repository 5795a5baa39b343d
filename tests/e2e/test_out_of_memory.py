"""A script that cannot have the memory it asks for is tried once more, and then ends the job."""

from __future__ import annotations

from pathlib import Path

from tests.support.job import elasticrun

LIMITED = """
import resource
held = b"x" * 50_000_000
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
more = bytes(2**30)
"""


def test_a_limit_of_the_process_is_met_twice_and_named(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(LIMITED)
    with elasticrun("-np", "1", "--", str(script)) as job:
        assert job.wait(60) == 1, job.describe()
        assert len(job.events("worker_started")) == 2
        first, second = job.events("out_of_memory")
        assert 50_000_000 < first["peak"] < 2**29
        assert first["room"] > second["room"] == 0
        assert job.events("host_blacklisted") == []
        said = [line for line in job.stderr.splitlines() if "again, though localhost has" in line]
        assert said, job.describe()
        assert "ran out of memory at" in said[-1]
        assert "MemoryError" in job.stderr
        job.assert_nothing_left()
