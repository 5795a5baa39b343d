"""Which variables reach other hosts unasked: useful ones, none of one machine, no secrets."""

from __future__ import annotations

import pytest

from launcher.launch.workers import forwarded, is_forwarded


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
