from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from msgspec import structs

from elastic_driver import contract
from elastic_driver.words.orders import JobSpec, StartWorkerOrder
from launcher.agent.environment import Meeting, worker_environment
from rendezvous.client_connections import is_loopback
from tests.launcher.agent.harness import place

SPEC = JobSpec("run-1", ("x",), "/", {}, heartbeat_timeout=12.5, max_restarts=3)
MEETING = Meeting("localhost", "http://127.0.0.1:1", Path("/run"))


def born_with(
    inherited: dict[str, str] | None = None,
    job_env: dict[str, str] | None = None,
    size: int = 2,
    master: str = "127.0.0.1",
    interface: str | None = None,
) -> dict[str, str]:
    order = StartWorkerOrder("localhost.3.7", place(1, size, slot=3), 4, 2, master, 29500)
    spec = dataclasses.replace(SPEC, env=job_env or {})
    meeting = MEETING if interface is None else dataclasses.replace(MEETING, interface=interface)
    return worker_environment(inherited or {}, spec, order, meeting)


def test_torchruns_names_have_torchruns_meaning() -> None:
    env = born_with()
    assert {name: env[name] for name in contract.TORCHRUN_NAMES} == {
        "RANK": "1",
        "LOCAL_RANK": "3",  # the slot: it names the device
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }


def test_horovods_names_have_horovods_meaning() -> None:
    env = born_with()
    assert {name: text for name, text in env.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",  # among the workers of the host, whatever their slots
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_CONTROLLER": "gloo",
    }


def test_in_a_slurm_job_a_worker_is_a_task_of_it() -> None:
    step = {"SLURM_JOB_NAME": "elastic-agent", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "mine", "SLURM_ARRAY_TASK_ID": "7"}
    env = born_with(step | {"SLURM_STEP_ID": "3"}, job)
    assert {name: text for name, text in env.items() if name.startswith("SLURM_")} == job | {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_STEP_ID": "3",
    }
    env = born_with(step)
    assert {name: text for name, text in env.items() if name.startswith("SLURM_")} == step
    inside = born_with({**step, "SLURM_JOB_ID": "5"})  # of --standalone in a batch script
    assert (inside["SLURM_PROCID"], inside["SLURM_NTASKS"]) == ("1", "2")


def test_a_worker_of_a_job_that_is_elastic_already_is_told_so() -> None:
    order = StartWorkerOrder("a.0.1", place(0, 1), 1, 0, "127.0.0.1", 1)
    for elastic, told in ((False, None), (True, "1")):
        env = worker_environment({}, SPEC, structs.replace(order, elastic=elastic), MEETING)
        assert env.get(contract.NEWCOMER) == told


def test_workers_compare_their_states_unless_they_are_told_not_to() -> None:
    order = StartWorkerOrder("a.0.1", place(0, 1), 1, 0, "127.0.0.1", 1)
    for compares, told in ((True, None), (False, "0")):
        spec = dataclasses.replace(SPEC, verify_state=compares)
        env = worker_environment({contract.VERIFY_STATE: "7"}, spec, order, MEETING)
        assert env.get(contract.VERIFY_STATE) == told, "nothing is inherited"


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, "3"), ("4,5,6, 7", "7"), ("GPU-a,GPU-b", ""), ("", "")]
)
def test_with_a_virtual_local_rank_a_worker_sees_only_its_own_gpu(
    visible: str | None, seen: str
) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    order = StartWorkerOrder("localhost.3.7", place(1, 2, slot=3), 4, 2, "127.0.0.1", 29500)
    spec = dataclasses.replace(SPEC, virtual_local_rank=True)
    env = worker_environment(inherited, spec, order, MEETING)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", seen)


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, "6,7"), ("0,1,2,3,4,5,8,9", "8,9"), ("0,1", "")]
)
def test_a_worker_may_have_several_gpus_of_its_own(visible: str | None, seen: str) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    order = StartWorkerOrder("localhost.3.7", place(1, 2, slot=3), 4, 2, "127.0.0.1", 29500)
    spec = dataclasses.replace(SPEC, virtual_local_rank=True, devices_of_a_worker=2)
    env = worker_environment(inherited, spec, order, MEETING)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", seen)


def test_our_own_names_say_who_and_where() -> None:
    env = born_with()
    assert env[contract.RUN_ID] == "run-1"
    assert env[contract.WORKER_ID] == "localhost.3.7"
    assert env[contract.ROUND] == "4"
    assert float(env[contract.HEARTBEAT_TIMEOUT]) == 12.5
    assert env[contract.TOKEN_FILE] == "/run/token-localhost.3.7"
    assert contract.JOB_MARK not in env
    assert born_with({contract.JOB_MARK: "/run/token"})[contract.JOB_MARK] == "/run/token"


def test_the_jobs_variables_win_over_inherited_ones_and_the_contract_over_both() -> None:
    env = born_with({"A": "old", "B": "kept", "RANK": "9"}, {"A": "new", "RANK": "8"})
    assert (env["A"], env["B"], env["RANK"]) == ("new", "kept", "1")


def test_leftovers_of_an_outer_launcher_are_not_inherited() -> None:
    env = born_with({"TORCHELASTIC_USE_AGENT_STORE": "True", "ELASTIC_PASSWORD": "users"})
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["ELASTIC_PASSWORD"] == "users"


def test_tf_config_is_the_orders_or_else_the_users_own() -> None:
    order = StartWorkerOrder("a.0.1", place(0, 1), 1, 0, "127.0.0.1", 1, tf_config="{}")
    assert worker_environment({"TF_CONFIG": "old"}, SPEC, order, MEETING)["TF_CONFIG"] == "{}"
    assert born_with({"TF_CONFIG": "mine"})["TF_CONFIG"] == "mine"


def test_threads_are_limited_only_where_workers_share_the_host() -> None:
    assert born_with()["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in born_with(size=1)
    assert born_with({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_gloo_stays_on_loopback_only_for_a_loopback_master() -> None:
    assert born_with()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in born_with(master="10.0.0.1")
    assert born_with(job_env={"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"


def test_of_several_interfaces_a_worker_has_the_one_that_its_host_has() -> None:
    several = {"GLOO_SOCKET_IFNAME": "ib0,eth1", "NCCL_SOCKET_IFNAME": "ib0,eth1"}
    env = born_with(job_env=several, interface="eth1")
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "eth1"
    own = born_with(job_env={**several, "NCCL_SOCKET_IFNAME": "^docker"}, interface="eth1")
    assert own["NCCL_SOCKET_IFNAME"] == "^docker"
    assert [is_loopback(a) for a in ("::1", "127.8.8.8", "node1", "10.0.0.1")] == [
        True,
        True,
        False,
        False,
    ]
