"""Which variables reach other hosts unasked: useful ones, none of one machine, no secrets."""

from __future__ import annotations

import pytest

from launcher.launch.plan import driver_timeout, forwarded, is_forwarded, split_variables
from launcher.options.given import resolve


@pytest.mark.parametrize(
    "name",
    ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_CBWR",
     "NCCL_DEBUG", "NCCL_IB_HCA", "GLOO_DEVICE_TRANSPORT", "TORCH_LOGS", "CUDA_LAUNCH_BLOCKING",
     "PYTORCH_CUDA_ALLOC_CONF", "LC_ALL", "VIRTUAL_ENV"],
)  # fmt: skip
def test_what_shapes_python_numerics_and_communication_goes(name: str) -> None:
    assert is_forwarded(name)


@pytest.mark.parametrize(
    "name",
    ["HOME", "USER", "HOSTNAME", "DISPLAY", "LD_PRELOAD", "PYTHONHOME", "PYTHONSTARTUP", "TMPDIR",
     "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "RANK", "MASTER_ADDR",
     "TF_CONFIG", "TF_CLI_CONFIG_FILE", "SSH_AUTH_SOCK", "http_proxy"],
)  # fmt: skip
def test_what_belongs_to_one_machine_or_to_nobody_stays(name: str) -> None:
    assert not is_forwarded(name)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "NCCL_TOKEN", "TORCH_API_KEY", "PYTHONPASSWORD", "OMP_SECRET", "CUDA_CREDENTIALS"],
)
def test_what_looks_like_a_secret_stays_whatever_it_begins_with(name: str) -> None:
    assert not is_forwarded(name)


def test_values_go_unchanged_and_in_a_stable_order() -> None:
    assert list(forwarded({"PATH": "/b", "HOME": "/h", "LANG": "C"}).items()) == [
        ("LANG", "C"),
        ("PATH", "/b"),
    ]


@pytest.mark.parametrize(
    ("words", "variables", "command"),
    [
        ("python train.py", {}, "python train.py"),
        ("A=1 B_2=x=y python train.py C=3", {"A": "1", "B_2": "x=y"}, "python train.py C=3"),
        ("EMPTY= train.py", {"EMPTY": ""}, "train.py"),
        ("./a=b", {}, "./a=b"),
        ("1A=2 train.py", {}, "1A=2 train.py"),
        ("A=1", {"A": "1"}, ""),
    ],
)
def test_variables_in_front_of_a_command_are_as_in_a_shell(
    words: str, variables: dict[str, str], command: str
) -> None:
    assert split_variables(tuple(words.split())) == (variables, tuple(command.split()))


# ---- without a driver --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "seconds"),
    [
        ([], 0.0),  # the run has a random name: nobody will resume it
        (["--run-id", "big"], 300.0),
        (["--run-id", "big", "--driver-timeout", "auto"], 300.0),
        (["--run-id", "big", "--driver-timeout", "0"], 0.0),
        (["--driver-timeout", "20"], 20.0),
    ],
)
def test_a_job_with_a_name_waits_for_the_next_driver(argv: list[str], seconds: float) -> None:
    assert driver_timeout(resolve(argv, {}).options) == seconds
