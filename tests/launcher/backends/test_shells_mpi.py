"""How mpirun is used: its words, its environment, and what its failures mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher.backends.base import make_backend
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.remote_shell import Login
from launcher.backends.shells import MpirunShell, SshShell

SSH = SshShell(port=2222, identity_file="/key", alive_interval=2)
SHELL = MpirunShell(ssh=SSH, variables={}, python="/py", home=Path("/home"))

NOISE = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
"""


def test_each_host_has_an_mpirun_of_its_own_and_an_agent_apart_from_it() -> None:
    backend = RemoteBackend(BackendJob(endpoint="http://10.0.0.1:7"), SHELL)
    argv = backend.plan("n1", 3, "cafe").argv
    assert argv[:-1] == (
        *("mpirun", "--host", "n1:1", "-np", "1", "--bind-to", "none", "--mca", "plm_rsh_args"),
        "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=2 -o ServerAliveCountMax=3 "
        "-o ClearAllForwardings=yes -o ControlMaster=no -p 2222 -i /key",
        *("/bin/sh", "-c"),
    )
    assert argv[-1].endswith(
        "exec /py -m launcher.agent.remote apart cafe --endpoint http://10.0.0.1:7 --host n1 "
        "--incarnation 3"
    )


@pytest.mark.parametrize("name", ["-x", "a b", "2001:db8::7", "a:2,b"])
def test_a_name_that_is_none_never_reaches_mpirun(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot reach"):
        SHELL.argv(name, "look", "/")


def test_a_rank_s_own_variables_are_not_handed_to_a_nested_mpirun() -> None:
    mine = {"PATH": "/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_MCA_orte_x": "1"}
    five = {**mine, "PRTE_MCA_x": "1", "PMIX_MCA_y": "2"}  # of Open MPI 5
    assert MpirunShell(ssh=SSH, variables=five).environ() == five
    assert MpirunShell(ssh=SSH, variables=mine).environ() == mine
    of_a_rank = {**mine, "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    del mine["OMPI_MCA_orte_x"]
    assert MpirunShell(ssh=SSH, variables=of_a_rank).environ() == mine


@pytest.mark.parametrize(
    ("code", "said", "meaning"),
    [
        (255, f"ssh: Could not resolve hostname n1\n{NOISE}", "; its name has no address"),
        (1, f"bash: orted: command not found\n{NOISE}", "n1: bash: orted: command not found"),
        (1, f"mpirun has detected an attempt to run as root.\n{NOISE}", "OMPI_ALLOW_RUN_AS_ROOT"),
        (127, f"elasticrun: no Python at /py\n{NOISE}", "n1: there is no Python at /py"),
        (3, f"last words\n{NOISE}", 'n1: /py ended with exit status 3 and said "last words"'),
    ],
)  # fmt: skip
def test_what_mpirun_says_becomes_one_line(code: int, said: str, meaning: str) -> None:
    line = SHELL.explain("n1", code, said, Login(reached="last" in said or "elasticrun" in said))
    assert meaning in line
    assert "\n" not in line


def test_a_lost_daemon_is_a_lost_connection_and_anything_else_the_agent_s_end() -> None:
    assert SHELL.ending("n1", 205, "ORTE has lost communication with a remote daemon.") is None
    assert SHELL.ending("n1", 0, "") == "the agent on n1 has ended"
    assert SHELL.ending("n1", 137, NOISE) == "the agent on n1 was killed by SIGKILL"


# ---- the program -------------------------------------------------------------------------


def check(backend: str, environ: dict[str, str]) -> None:
    make_backend(backend, BackendJob(environ=environ, allocation="17")).check(())


def test_a_missing_program_is_one_line(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    with pytest.raises(UsageError, match="mpirun, which was not found"):
        check("mpi", nothing)
    with pytest.raises(UsageError, match="srun was not found"):
        check("slurm", nothing)


def test_an_mpirun_of_another_kind_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    program.chmod(0o755)
    check("mpi", {"PATH": str(tmp_path)})
    program.write_text("#!/bin/sh\necho HYDRA build details:\n")
    with pytest.raises(UsageError, match="is not; use --backend ssh"):
        check("mpi", {"PATH": str(tmp_path)})
