"""How srun is used: its words, its environment, what its failures mean, which nodes there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.runtime.discovery import DiscoveryError
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.remote_shell import Login
from launcher.backends.shells import SrunShell
from launcher.backends.slurm_allocation import AllocationDiscovery

SHELL = SrunShell(job_id="17", variables={}, python="/py", home=Path("/our home"))


def test_an_agent_is_a_step_of_its_own_that_shares_its_node() -> None:
    backend = RemoteBackend(BackendJob(endpoint="http://10.0.0.1:7"), SHELL)
    argv = backend.plan("n1", 3, "cafe").argv
    assert argv[:-1] == (
        *("srun", "--jobid=17", "--nodes=1", "--ntasks=1", "--nodelist=n1"),
        *("--overlap", "--immediate=10", "--no-kill", "--kill-on-bad-exit=0"),
        *("--mpi=none", "--cpu-bind=none", "--chdir=/", "--quiet", "--job-name=elastic-agent"),
        *("/bin/sh", "-c"),
    )
    assert argv[-1].startswith(
        "printf '%s-%s\\n' elastic login-over; cd '/our home' 2>/dev/null || cd /; "
    )
    assert argv[-1].endswith(
        "exec /py -m launcher.agent.remote keep cafe --endpoint http://10.0.0.1:7 --host n1 "
        "--incarnation 3"
    )


def test_an_agent_has_its_nodes_gpus_and_other_steps_beside_it_have_none() -> None:
    options = {"n1": ("--gpus=3",), "n2": ("--het-group=1", "--gpus=1")}
    shell = SrunShell(job_id="17", variables={}, options=options)
    assert shell.argv("n1", "keep", "cafe")[:3] == ("srun", "--gpus=3", "--jobid=17")
    assert shell.argv("n1", "look", "/")[:3] == ("srun", "--gres=none", "--jobid=17")
    assert shell.argv("n2", "keep", "x")[:3] == ("srun", "--het-group=1", "--gpus=1")
    assert shell.argv("n2", "end", "x")[:3] == ("srun", "--het-group=1", "--gres=none")


def test_a_node_name_without_an_address_is_looked_up_in_slurm(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\necho "$*" >> $0.asked\n'
        'case $4 in gone.invalid) echo "Node gone.invalid not found"; exit 1 ;; esac\n'
        'echo "NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n Version=22.05"\n'
    )
    scontrol.chmod(0o755)
    shell = SrunShell(job_id="17", variables={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert shell.look_up("gpu001.invalid") == "10.0.0.7"
    assert shell.look_up("gone.invalid") == "gone.invalid"
    assert shell.look_up("localhost") == "localhost"
    asked = (tmp_path / "scontrol.asked").read_text().splitlines()
    assert asked == [f"--oneliner show node {n}" for n in ("gpu001.invalid", "gone.invalid")]
    assert SrunShell(job_id="17", variables={"PATH": ""}).look_up("x.invalid") == "x.invalid"


@pytest.mark.parametrize("name", ["-x", "a b", "n1,n2", "n[1-2]", ""])
def test_a_name_that_is_none_never_reaches_srun(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot reach"):
        SHELL.argv(name, "look", "/")


def test_what_sbatch_was_asked_for_does_not_shape_the_steps() -> None:
    ours = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_NTASKS": "8", "SLURM_GPUS_PER_TASK": "1"}
    more = {**ours, "SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE"}
    shell = SrunShell(job_id="17", variables=more)
    assert shell.environ() == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_EXPORT_ENV": "NONE"}
    assert "SLURM_NTASKS" not in repr(shell)


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("srun: error: Unable to create step for job 17: "
         "Requested node configuration is not available",
         "Requested node configuration is not available; it is not a node of this allocation"),
        ("srun: error: Task launch for StepId=17.3 failed on node n1: "
         "Communication connection failure\nsrun: error: Timed out waiting for job step",
         "failure / srun: error: Timed out waiting for job step; its slurmd does not answer"),
        ("srun: error: Unable to confirm allocation for job 17: Invalid job id specified\n"
         "srun: Check SLURM_JOB_ID environment variable.", "is its time over?"),
        ("srun: error: Unable to do something new", "try: scontrol show node n1"),
        ("elasticrun: no Python at /py\nsrun: error: n1: task 0: Exited with exit code 127",
         "n1: there is no Python at /py"),
    ],
)  # fmt: skip
def test_what_srun_says_becomes_one_line(said: str, meaning: str) -> None:
    line = SHELL.explain("n1", 127 if "Python" in said else 1, said, Login(reached=True))
    assert line.startswith("n1: ")
    assert meaning in line
    assert "\n" not in line


def test_srun_ends_with_the_agent_and_says_how() -> None:
    assert SHELL.ending("n1", 0, "") == "the agent on n1 has ended"
    assert SHELL.ending("n1", 137, "srun: Killed") == "the agent on n1 was killed by SIGKILL"
    assert "the node failed" in str(SHELL.ending("n1", 1, "srun: error: Node failure on n1"))


# ---- which nodes there still are ---------------------------------------------------------


@pytest.fixture
def squeue(tmp_path: Path) -> Path:
    """A stand-in that answers with the file `nodes`, and fails without it."""
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\ntest "$2" = --jobs=17 && exec cat {tmp_path}/nodes\n')
    program.chmod(0o755)
    return tmp_path


def discovery(folder: Path, every: float) -> AllocationDiscovery:
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    return AllocationDiscovery("17", (("n1", 2), ("n2", 4)), path, every=every)


def test_nodes_that_slurm_takes_away_go_and_new_ones_come(squeue: Path) -> None:
    found = discovery(squeue, 0.0)
    (squeue / "nodes").write_text("17 17 RUNNING n[2-3]\n")
    assert found.find() == (("n2", 4), ("n3", 2))


def test_components_of_the_job_count_and_other_tasks_of_its_array_do_not(squeue: Path) -> None:
    found = discovery(squeue, 0.0)
    (squeue / "nodes").write_text("17 17+0 RUNNING n1\n18 17+1 RUNNING n[2-3]\n")
    assert found.find() == (("n1", 2), ("n2", 4), ("n3", 2))
    array = "18 17_1 COMPLETING n7\n17 17_2 RUNNING n2\n19 17_[3-9] PENDING\n"
    (squeue / "nodes").write_text(array)
    assert found.find() == (("n2", 4),)


def test_slurm_is_not_asked_before_it_is_time(squeue: Path) -> None:
    assert discovery(squeue, 1000.0).find() == (("n1", 2), ("n2", 4))


def test_no_answer_is_an_error_and_no_empty_list(squeue: Path) -> None:
    found = discovery(squeue, 0.0)
    with pytest.raises(DiscoveryError, match="Slurm job 17"):
        found.find()
    (squeue / "nodes").write_text("\n")
    with pytest.raises(DiscoveryError, match="Slurm job 17"):
        found.find()


@pytest.mark.parametrize("state", ["CANCELLED n[1-2]", "TIMEOUT ", "COMPLETING n1"])
def test_the_end_of_the_allocation_is_told_once(squeue: Path, state: str) -> None:
    found, reasons = discovery(squeue, 0.0), []
    found.on_over = reasons.append
    (squeue / "nodes").write_text(f"17 17 {state}\n")
    assert found.find() == found.find() == (("n1", 2), ("n2", 4))
    assert reasons == [f"Slurm job 17 is over ({state.split(maxsplit=1)[0].lower()}, says Slurm)"]


def test_a_job_that_slurm_has_forgotten_is_over(squeue: Path) -> None:
    found, reasons = discovery(squeue, 0.0), []
    found.on_over = reasons.append
    complaint = "slurm_load_jobs error: Invalid job id specified"
    (squeue / "squeue").write_text(f"#!/bin/sh\necho '{complaint}' >&2; exit 1\n")
    found.find()
    assert reasons == ["Slurm job 17 is over (completed, says Slurm)"]


def test_a_question_under_way_can_be_cancelled(squeue: Path) -> None:
    (squeue / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    found = discovery(squeue, 0.0)
    found.cancel()
    with pytest.raises(DiscoveryError):
        found.find()
