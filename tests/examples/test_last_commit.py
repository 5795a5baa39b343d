"""A change after the last commit of an epoch: the loop of that epoch finds nothing left.

Every example comes through it, also those that ask after their loop what was in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job import JOBS, ROOT, elasticrun

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "commits", "says"),
    [
        ("tutorial/train_elastic.py", "--epochs 2", 29, "epoch 1: loss "),
        ("digits.py", "--epochs 2", 23, "done after "),
        ("digits_exact.py", "--epochs 2", 15, "fingerprint"),
        ("char_lm.py", "--epochs 2 --characters 30000", 8, "it writes:"),
    ],
)
def test_every_example_survives_a_loss_after_the_last_commit_of_an_epoch(
    script: str, args: str, commits: int, says: str, tmp_path: Path
) -> None:
    lost = (str(JOBS / "lost_at_commit.py"), str(tmp_path / "lost"), str(commits))
    with elasticrun("-np", "2", *lost, str(EXAMPLES / script), *args.split()) as job:
        assert job.wait(150) == 0, job.describe()
        assert says in job.stdout, job.describe()
        assert (tmp_path / "lost").exists()
        assert len(job.rounds()) >= 2


def test_a_plain_script_comes_back_to_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    saved = tmp_path / "line.pt"
    for _ in range(2):  # the second one as after a loss between the checkpoint and the end
        script = (str(EXAMPLES / "plain_ddp.py"), "--steps", "50", "--checkpoint", str(saved))
        with elasticrun("-np", "2", *script) as job:
            assert job.wait(60) == 0, job.describe()
            assert "done after 50 steps" in job.stdout
