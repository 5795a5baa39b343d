"""Horovod's public names and signatures, and what docs/horovod.md says of each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

PAGE = Path(__file__).resolve().parents[2] / "docs" / "horovod.md"
DEFAULTS = {"WORLD": hvd.global_process_set, "NONE": hvd.Compression.none, "Average": hvd.Average}
SIGNATURES = {  # of Horovod 0.28.1, by arguments
    "": (
        "ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled "
        "is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled "
        "mpi_threads_supported nccl_built rank rocm_built shutdown size stop_timeline "
    ),
    "comm=None, process_sets=None": "init",
    "device=-1": "join",
    "file_path, mark_cycles=False": "start_timeline",
    "handle": "poll synchronize",
    "obj, name=None": "allgather_object",
    "obj, root_rank=0, name=None, process_set=WORLD": "broadcast_object",
    (
        "optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, "
        "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
        "sparse_as_dense=False, process_set=WORLD"
    ): "DistributedOptimizer",
    "optimizer, root_rank, model=None": "broadcast_optimizer_state",
    "params, root_rank": "broadcast_parameters",
    "process_set": "add_process_set remove_process_set",
    "process_set=WORLD": "barrier",
    (
        "tensor, average=None, name=None, compression=NONE, op=None, prescale_factor=1.0, "
        "postscale_factor=1.0, process_set=WORLD"
    ): "allreduce",
    (
        "tensor, average=None, name=None, op=None, prescale_factor=1.0, "
        "postscale_factor=1.0, process_set=WORLD"
    ): "allreduce_ allreduce_async allreduce_async_",
    "tensor, name, op, process_set=WORLD": "sparse_allreduce_async",
    (
        "tensor, name=None, compression=NONE, op=Average, process_set=WORLD, "
        "prescale_factor=1.0, postscale_factor=1.0"
    ): "reducescatter",
    (
        "tensor, name=None, op=Average, process_set=WORLD, prescale_factor=1.0, "
        "postscale_factor=1.0"
    ): "reducescatter_async",
    "tensor, name=None, process_set=WORLD": "allgather allgather_async",
    "tensor, root_rank, name=None, process_set=WORLD": (
        "broadcast broadcast_ broadcast_async broadcast_async_ "
    ),
    "tensor, splits=None, name=None, process_set=WORLD": "alltoall alltoall_async",
    (
        "tensors, average=None, name=None, compression=NONE, op=None, "
        "prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD"
    ): "grouped_allreduce",
    (
        "tensors, average=None, name=None, op=None, prescale_factor=1.0, "
        "postscale_factor=1.0, process_set=WORLD"
    ): "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_",
    (
        "tensors, name=None, compression=NONE, op=Average, process_set=WORLD, "
        "prescale_factor=1.0, postscale_factor=1.0"
    ): "grouped_reducescatter",
    (
        "tensors, name=None, op=Average, process_set=WORLD, prescale_factor=1.0, "
        "postscale_factor=1.0"
    ): "grouped_reducescatter_async",
    "tensors, name=None, process_set=WORLD": "grouped_allgather grouped_allgather_async",
}
OTHERS = {
    *("Adasum", "Average", "Max", "Min", "Product", "Sum", "Compression", "ProcessSet"),
    *("HorovodInternalError", "SyncBatchNorm", "check_extension", "elastic", "global_process_set"),
}


def rows(title: str = "Every name") -> dict[str, tuple[str, str]]:
    """What the page says of each name: same, different or absent, and why."""
    table = PAGE.read_text().partition(f"## {title}")[2].partition("\n## ")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = cells[1], cells[2]
    return found


def arguments() -> dict[str, str]:
    return {name: given for given, names in SIGNATURES.items() for name in names.split()}


def test_the_page_lists_every_name_with_a_reason_where_it_differs() -> None:
    listed = rows()
    assert listed.keys() == arguments().keys() | OTHERS
    for name, (here, why) in listed.items():
        assert here in ("same", "different", "absent"), name
        assert why or here == "same", name
        assert hasattr(hvd, name) == (here != "absent"), name


def test_arguments_and_defaults_are_horovods() -> None:
    for name, given in arguments().items():
        expected = []
        for argument in filter(None, re.split(r",\s*", given)):
            key, has_default, text = argument.partition("=")
            default: object = inspect.Parameter.empty
            if has_default:
                default = DEFAULTS[text] if text in DEFAULTS else eval(text)  # noqa: S307
            expected.append((key, default))
        signature = inspect.signature(getattr(hvd, name))
        found = [(p.name, p.default) for p in signature.parameters.values()]
        assert found == expected, name


def test_the_page_lists_the_names_of_the_elastic_api() -> None:
    listed = rows("Names of `hvd.elastic`")
    assert listed.keys() == {"ElasticSampler", "ObjectState", "TorchState", "run"}
    for name, (here, why) in listed.items():
        assert here in ("same", "different"), name
        assert why or here == "same", name
        assert hasattr(hvd.elastic, name), name


def test_what_is_built_is_told_as_it_is() -> None:
    usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if usable else (0, 0, 0)
    assert hvd.nccl_built() == nccl[0] * 10000 + nccl[1] * 100 + nccl[2]
    assert hvd.cuda_built() is (torch.version.cuda is not None)
    assert hvd.rocm_built() is (torch.version.hip is not None)
    assert hvd.gloo_built() is hvd.gloo_enabled() is True
    absent = hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built
    assert not any(is_there() for is_there in absent)
