"""What `worker.torch_seams` expects of torch; and that no other module uses a private name."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed import ProcessGroupGloo
from torch.utils.data import DataLoader, TensorDataset

from tests.support.job import ROOT

# ---- each name ----------------------------------------------------------------------------------

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(8))
LIMIT = timedelta(seconds=30)


def the_module(name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(name)


def an_iterator(**options: Any) -> Any:
    return iter(DataLoader(DATA, batch_size=2, **options))


def with_processes(field: str) -> Callable[[], object]:
    """What asks an iterator with one process for a field."""

    def ask() -> object:
        iterator = an_iterator(num_workers=1)
        try:
            return getattr(iterator, field)
        finally:
            iterator._shutdown_workers()

    return ask


def in_a_world(ask: Callable[[Any], object]) -> Callable[[], object]:
    """What asks the group of this process alone."""

    def asked() -> object:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return ask(dist.group.WORLD)
        finally:
            dist.destroy_process_group()

    return asked


def in_a_join(model: Any) -> object:
    with model.join():
        return model._divide_by_initial_world_size


def used_scaler() -> Any:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    return scaler


def a_sparse_tensor() -> Any:
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True
    )


c10d: Any = dist.distributed_c10d
loader_code: Any = importlib.import_module("torch.utils.data.dataloader")
norms: Any = importlib.import_module("torch.nn.modules.batchnorm")
DDP = nn.parallel.DistributedDataParallel

# Each private name, and what raises AttributeError, ImportError or KeyError on a torch without it.
NAMES: dict[str, Callable[[], object]] = {
    "torch._foreach_copy_": lambda: torch._foreach_copy_,
    "torch._foreach_add_": lambda: torch._foreach_add_,
    "torch._foreach_mul_": lambda: torch._foreach_mul_,
    "torch._foreach_div_": lambda: torch._foreach_div_,
    "Tensor._version": lambda: torch.zeros(1)._version,
    "Tensor._base": lambda: torch.zeros(1)._base,
    "Tensor._indices": lambda: a_sparse_tensor()._indices,
    "Tensor._values": lambda: a_sparse_tensor()._values,
    "torch._utils": the_module("torch._utils"),
    "torch._utils._flatten_dense_tensors": lambda: torch._utils._flatten_dense_tensors,
    "torch._utils._unflatten_dense_tensors": lambda: torch._utils._unflatten_dense_tensors,
    "dist._compute_bucket_assignment_by_size": lambda: dist._compute_bucket_assignment_by_size,
    "Module._parameters": lambda: nn.Linear(1, 1)._parameters,
    "Module._buffers": lambda: nn.Linear(1, 1)._buffers,
    "Module._modules": lambda: nn.Linear(1, 1)._modules,
    "Module._non_persistent_buffers_set": lambda: nn.Linear(1, 1)._non_persistent_buffers_set,
    "batchnorm._BatchNorm": lambda: norms._BatchNorm,
    "_BatchNorm._check_input_dim": lambda: nn.BatchNorm1d._check_input_dim,
    "batchnorm._NormBase": lambda: norms._NormBase,
    "DDP._distributed_broadcast_coalesced": lambda: DDP._distributed_broadcast_coalesced,
    "DDP._check_comm_hook": lambda: DDP._check_comm_hook,
    "DDP._divide_by_initial_world_size": in_a_world(lambda _: in_a_join(DDP(nn.Linear(1, 1)))),
    "torch._dynamo": the_module("torch._dynamo"),
    "Variable._execution_engine": lambda: torch.autograd.Variable._execution_engine.queue_callback,
    "torch._C._current_graph_task_id": lambda: torch._C._current_graph_task_id,
    "Optimizer._optimizer_step_pre_hooks": lambda: (
        torch.optim.SGD([nn.Parameter(torch.ones(1))])._optimizer_step_pre_hooks
    ),
    "GradScaler._scale": lambda: used_scaler()._scale,
    "GradScaler._growth_tracker": lambda: used_scaler()._growth_tracker,
    "GradScaler._per_optimizer_states": lambda: used_scaler()._per_optimizer_states,
    "GradScaler._maybe_opt_step": lambda: torch.amp.GradScaler._maybe_opt_step,
    "torch._C._distributed_c10d.OpType": lambda: (
        importlib.import_module("torch._C._distributed_c10d").OpType
    ),
    "c10d._world.pg_map": lambda: c10d._world.pg_map,
    "c10d._get_default_group": lambda: c10d._get_default_group,
    "c10d._abort_process_group": lambda: c10d._abort_process_group,
    "ProcessGroup._device_types": in_a_world(lambda group: group._device_types),
    "ProcessGroup._get_backend": in_a_world(lambda group: group._get_backend(CPU)),
    "Backend._get_sequence_number_for_group": in_a_world(
        lambda group: group._get_backend(CPU)._get_sequence_number_for_group
    ),
    "Work._get_op_type": lambda: dist.Work._get_op_type,
    "ProcessGroupGloo._Options": lambda: ProcessGroupGloo._Options,
    "ProcessGroupGloo._Options._devices": lambda: ProcessGroupGloo._Options()._devices,
    "ProcessGroupGloo._Options._timeout": lambda: ProcessGroupGloo._Options()._timeout,
    "ProcessGroupGloo._set_default_timeout": lambda: ProcessGroupGloo._set_default_timeout,
    "data._utils.signal_handling._error_if_any_worker_fails": lambda: (
        torch.utils.data._utils.signal_handling._error_if_any_worker_fails
    ),
    "dataloader._BaseDataLoaderIter": lambda: loader_code._BaseDataLoaderIter,
    "dataloader._MultiProcessingDataLoaderIter": lambda: (
        loader_code._MultiProcessingDataLoaderIter._try_get_data
    ),
    "_MultiProcessingDataLoaderIter._try_get_data": lambda: (
        loader_code._MultiProcessingDataLoaderIter._try_get_data
    ),
    "DataLoader._iterator": lambda: DataLoader(DATA)._iterator,
    "iterator._index_sampler": lambda: an_iterator()._index_sampler,
    "iterator._sampler_iter": lambda: vars(an_iterator())["_sampler_iter"],
    "iterator._num_workers": lambda: vars(an_iterator())["_num_workers"],
    "iterator._num_yielded": lambda: vars(an_iterator())["_num_yielded"],
    "iterator._prefetch_factor": with_processes("_prefetch_factor"),
    "iterator._persistent_workers": lambda: vars(an_iterator())["_persistent_workers"],
    "iterator._in_order": with_processes("_in_order"),
    "iterator._shutdown": with_processes("_shutdown"),
    "iterator._workers": with_processes("_workers"),
    "filesystem._StorageInfo": lambda: (
        importlib.import_module("torch.distributed.checkpoint.filesystem")._StorageInfo
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    try:
        NAMES[name]()
    except (AttributeError, ImportError, KeyError) as lost:
        pytest.fail(
            f"torch {torch.__version__} has no {name} any more ({lost}); "
            "elastic_driver/worker/torch_seams.py says what it is for, and what happens without it"
        )


def test_a_lost_name_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    with pytest.raises(pytest.fail.Exception, match=r"has no torch\._foreach_copy_ any more"):
        test_torch_has_the_name("torch._foreach_copy_")


# ---- what the names do --------------------------------------------------------------------------


@pytest.fixture
def seams() -> Any:
    """The module. It is imported late, so that the tests above run without it, too."""
    return importlib.import_module("elastic_driver.worker.torch_seams")


@pytest.fixture
def world() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_each_change_in_place_raises_the_version(seams: Any) -> None:
    tensor = torch.zeros(3)
    before = seams.version_of(tensor)
    tensor.add_(1)
    assert seams.version_of(tensor) == before + 1
    tensor.data = torch.ones(3)  # not a change in place
    assert seams.version_of(tensor) >= before + 1


def test_a_tensor_of_inference_mode_has_no_version(seams: Any) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    with pytest.raises(RuntimeError):
        seams.version_of(tensor)


def test_lists_are_changed_in_one_call(seams: Any) -> None:
    found = [torch.ones(2), torch.ones(3)]
    others = [torch.full((2,), 3.0), torch.full((3,), 4.0)]
    seams.add_all(found, others)
    seams.multiply_all(found, 2.0)
    seams.divide_all(found, 4.0)
    assert [each.tolist() for each in found] == [[2.0] * 2, [2.5] * 3]
    seams.copy_all(found, others)
    assert [each.tolist() for each in found] == [[3.0] * 2, [4.0] * 3]


def test_a_vector_has_the_values_of_tensors_and_gives_them_back(seams: Any) -> None:
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(2.0)]
    flat = seams.flatten(parts)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    views = seams.unflatten(flat, parts)
    assert all(torch.equal(view, part) for view, part in zip(views, parts, strict=True))
    assert seams.viewed_by(views[0]) is flat
    assert seams.viewed_by(flat) is None


def test_buckets_are_those_of_ddp(seams: Any) -> None:
    parts = [torch.zeros(4) for _ in range(5)]  # of 16 bytes
    found = seams.buckets(parts, 32)
    assert sorted(index for bucket in found for index in bucket) == list(range(5))
    assert max(map(len, found)) == 2


def test_a_sparse_tensor_that_is_not_coalesced_shows_its_entries_as_they_are(seams: Any) -> None:
    sparse = a_sparse_tensor()
    assert seams.coordinates(sparse).tolist() == [[1, 1]]
    assert seams.entries(sparse).tolist() == [2.0, 3.0]


def test_a_module_holds_parameters_buffers_and_modules_by_name(seams: Any) -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(seams.parameters_of(norm)) == ["weight", "bias"]
    assert set(seams.buffers_of(norm)) >= {"running_mean", "running_var", "scratch"}
    assert seams.unsaved_buffers_of(norm) == {"scratch"}
    inner = nn.Sequential(norm)
    assert list(seams.children_of(inner).values()) == [norm]
    assert isinstance(norm, seams.WithStatistics)
    assert isinstance(nn.InstanceNorm1d(2), seams.WithStatistics)
    assert not isinstance(nn.LayerNorm(2), seams.WithStatistics)


def test_a_batch_normalisation_has_a_check_of_shapes_that_torch_calls(seams: Any) -> None:
    norm = seams.BatchNorm(2)
    assert norm(torch.ones(3, 2)).shape == (3, 2)
    with pytest.raises(ValueError, match="expected two dimensions or more, found 1"):
        norm(torch.ones(3))


@pytest.mark.usefixtures("world")
def test_ddp_broadcasts_buffers_by_the_method_of_a_subclass(seams: Any) -> None:
    sent: list[int] = []

    class Own(seams.OpenDataParallel):  # type: ignore[misc, name-defined]
        def broadcast_tensors(self, tensors: Any, bucket_bytes: int, source: int) -> None:
            sent.extend(tensor.numel() for tensor in tensors)
            super().broadcast_tensors(tensors, bucket_bytes, source)

    model = Own(nn.BatchNorm1d(2))
    sent.clear()
    model(torch.ones(3, 2))
    assert sorted(sent) == [1, 2, 2]  # mean, variance, and the number of batches


@pytest.mark.usefixtures("world")
def test_ddp_checks_a_hook_and_says_how_it_divides_in_a_join(seams: Any) -> None:
    model = seams.OpenDataParallel(nn.Linear(1, 1))
    model.check_hook(lambda state, bucket: torch.futures.Future())
    with pytest.raises(TypeError):
        model.check_hook("no function")
    for divides in (True, False):
        with model.join(divide_by_initial_world_size=divides):
            assert model.divides_by_first_size is divides


def test_a_backward_pass_has_a_number_and_an_end(seams: Any) -> None:
    assert seams.number_of_pass() == -1
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(2))

    def note(_: object) -> None:
        seen.append(seams.number_of_pass())
        seams.when_backward_ends(lambda: seen.append("end"))

    parameter.register_hook(note)
    (parameter * 2).sum().backward()
    (parameter * 2).sum().backward()
    first, end, second, again = seen
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert 0 <= first < second
    assert (end, again) == ("end", "end")


def test_an_optimizer_that_torch_has_not_made_calls_no_hooks(seams: Any) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            """Like a usual Lookahead: torch's constructor is not called."""

    assert seams.calls_hooks(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert not seams.calls_hooks(Bare())


def test_a_scaler_has_its_state_from_its_first_use_and_notes_each_step(seams: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert seams.scaler_state(scaler) is None
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    state = seams.scaler_state(scaler)
    numbers = {key: v.item() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
    assert numbers == scaler.state_dict()
    scaler.unscale_(optimizer)
    assert list(seams.scaler_steps(scaler)) == [id(optimizer)]
    scaler.step(optimizer)
    scaler.update()
    assert seams.scaler_steps(scaler) == {}
    assert seams.scaler_steps(torch.amp.GradScaler("cpu", enabled=False)) == {}


def test_the_step_that_a_scaler_makes_is_known_by_its_code(seams: Any) -> None:
    called: list[bool] = []

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            frame = inspect.currentframe()
            while frame is not None and not seams.is_step_of_scaler(frame.f_code):
                frame = frame.f_back
            called.append(frame is not None)

    parameter = nn.Parameter(torch.ones(1))
    optimizer = Looks([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    assert called == [True, False]


@pytest.mark.usefixtures("world")
def test_the_groups_are_known_with_their_backends(seams: Any) -> None:
    group = seams.default_group()
    assert list(seams.groups) == [group]
    assert "gloo" in seams.backend_names(group)
    assert CPU in seams.device_types(group)
    assert isinstance(seams.backend_for(group, CPU), ProcessGroupGloo)
    part = dist.new_group([0])
    assert list(seams.groups) == [group, part]


def test_without_a_group_there_is_no_default(seams: Any) -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        seams.default_group()


@pytest.mark.usefixtures("world")
def test_collectives_are_counted(seams: Any) -> None:
    count = seams.collective_counter(seams.default_group(), CPU)
    before = count()
    dist.all_reduce(torch.ones(1))
    assert count() == before + 1


@pytest.mark.usefixtures("world")
def test_a_collective_is_not_point_to_point(seams: Any) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    assert not seams.is_point_to_point(work)
    work.wait()


def test_dropped_groups_are_gone(seams: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seams.forget_groups()
    assert not dist.is_initialized()
    assert not seams.groups


def test_a_gloo_group_of_our_own_works_at_once(seams: Any) -> None:
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    made = seams.make_gloo(dist.HashStore(), 0, 1, device, connect=LIMIT, collective=LIMIT)
    tensor = torch.full((2,), 3.0)
    made.allreduce([tensor]).wait()
    assert tensor.tolist() == [3.0, 3.0]
    seams.set_timeout(made, timedelta(seconds=5))
    assert made.options._timeout == timedelta(seconds=5)


def test_an_iterator_without_processes_tells_what_it_draws_and_has_given(seams: Any) -> None:
    loader = DataLoader(DATA, batch_size=2)
    iterator = iter(loader)
    assert seams.is_loader_iterator(iterator)
    assert not seams.is_loader_iterator(loader)
    assert seams.sampler_of(iterator) is loader.batch_sampler
    assert seams.prefetching(vars(iterator)) is None
    for given in range(3):
        assert seams.batches_yielded(vars(iterator)) == given
        next(iterator)
    assert list(seams.drawing_of(vars(iterator))) == [[6, 7]]


def test_an_iterator_with_processes_draws_ahead_and_can_begin_anew(seams: Any) -> None:
    loader = DataLoader(
        DATA, batch_size=2, num_workers=1, prefetch_factor=3, persistent_workers=True
    )
    iterator: Any = iter(loader)
    try:
        assert isinstance(iterator, seams.IteratorWithProcesses)
        assert seams.prefetching(vars(iterator)) == (3, True, True)
        (process,) = seams.processes_of(iterator)
        assert process.is_alive()
        assert seams.kept_iterator(loader) is iterator
        seams.drop_iterator(loader)
        assert seams.kept_iterator(loader) is None
        assert not seams.is_shut_down(iterator)
    finally:
        iterator._shutdown_workers()
    assert seams.is_shut_down(iterator)


def test_torch_calls_the_check_that_takes_its_place(seams: Any) -> None:
    check = seams.check_of_ends()
    assert check is not None
    called: list[Callable[[], None]] = []
    seams.replace_check_of_ends(lambda: called.append(check))
    try:
        replaced = seams.check_of_ends()
        assert replaced is not None
        replaced()
    finally:
        seams.replace_check_of_ends(check)
    assert called == [check]
    assert seams.check_of_ends() is check


def test_the_wait_for_data_is_a_function_of_the_iterator(seams: Any) -> None:
    assert seams.code_of_wait().co_name in vars(seams.IteratorWithProcesses)


def test_the_place_of_a_chunk_has_file_start_and_length(seams: Any) -> None:
    place = seams.place_in("rank0.data", 16, 8)
    assert (place.relative_path, place.offset, place.length) == ("rank0.data", 16, 8)


# ---- the releases ---------------------------------------------------------------------------


def test_the_range_is_what_was_run(seams: Any) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest, newest = (Version(each) for each in (seams.RUN_ON[0], seams.RUN_ON[-1]))
    expected = f"torch>={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}"
    assert setup["options.extras_require"]["torch"] == expected
    assert f"torch=={oldest}" in (ROOT / "constraints.txt").read_text().splitlines()


# ---- and nowhere else ---------------------------------------------------------------------------

PACKAGES = ("elastic_driver", "rendezvous", "launcher")
SEAMS = ROOT / "elastic_driver" / "worker" / "torch_seams.py"
TREES = {
    path: ast.parse(path.read_text()) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
}
# Private by their underscore alone: of the standard library, of msgspec, and of Horovod's API.
DOCUMENTED = {"_asdict", "_replace", "_current_frames", "_exit", "_fields", "_getframe"} | {
    "_saved_state"
}
LIBRARY = {"_handle", "_actions"}  # of ctypes, and of argparse
PASSED_ON = {("driver.py", "'torch._dynamo'")}  # as the docstring of the module says
OWN = ("self", "cls")
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter")


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in OWN


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives to functions, classes, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def mentioned(node: ast.AST) -> list[str]:
    """The private names of other objects that a node of a module mentions."""
    if isinstance(node, ast.Attribute):
        known = is_own(node) and node.attr in EVERYWHERE
        return [node.attr] if private(node.attr) and not known else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        path = (node.module or "").split(".")
        hidden = [part for part in path if private(part)]
        return hidden + [each.name for each in node.names if hidden or private(each.name)]
    if isinstance(node, ast.Import):
        return [each.name for each in node.names if any(map(private, each.name.split(".")[1:]))]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
        name = node.args[-1 if getattr(node.func, "id", "") == "attrgetter" else 1]
        return [name.value] if isinstance(name, ast.Constant) and private(name.value) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = node.value in IN_SEAMS or node.value.startswith("torch._")
        return [repr(node.value)] if found else []
    return []


def foreign(tree: ast.AST, ours: frozenset[str], file: str = "") -> list[str]:
    """The private names in a module that are not ours, each with its line."""
    fields = {repr(name) for name in defined(tree)}  # asked for by name in their own module
    return [
        f"{name}, line {getattr(node, 'lineno', 0)}"
        for node in ast.walk(tree)
        for name in mentioned(node)
        if name not in ours | fields and (file, name) not in PASSED_ON
    ]


def in_seams() -> set[str]:
    """The private names of torch that the module mentions, in code and in strings."""
    tree = TREES[SEAMS]
    found = {name for node in ast.walk(tree) for name in mentioned(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier() and private(node.value):
                found.add(node.value)
            elif node.value.startswith("torch._"):
                found.add(node.value.removeprefix("torch."))
        elif isinstance(node, ast.FunctionDef) and private(node.name):
            found.add(node.name)
    return set(filter(private, found))


IN_SEAMS: set[str] = set()
EVERYWHERE = frozenset().union(*(set(defined(t)) for p, t in TREES.items() if p != SEAMS))
IN_SEAMS |= in_seams()
OURS = frozenset((EVERYWHERE | DOCUMENTED | LIBRARY) - IN_SEAMS)


def test_each_private_name_of_the_module_has_a_test() -> None:
    tested = {part for name in NAMES for part in name.split(".") if private(part)}
    assert {part for name in in_seams() for part in name.split(".")} == tested


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_are_used_in_one_module(path: Path) -> None:
    if path != SEAMS:
        assert foreign(TREES[path], OURS, path.name) == []


@pytest.mark.parametrize(
    "line",
    [
        "tensor._version",
        "torch._foreach_add_(a, b)",
        "dist._compute(a)",
        "getattr(scaler, '_growth_tracker', None)",
        "from torch.utils.data._utils import signal_handling",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "import_module('torch._dynamo')",
        "for where in ('_parameters', '_buffers'): pass",
        "self._check_comm_hook(hook)",
        "group._get_backend(device)._get_sequence_number_for_group()",
    ],
)
def test_such_a_name_would_be_found(line: str) -> None:
    assert foreign(ast.parse(line), OURS) != []


def our_classes() -> list[type]:
    """The classes of modules that import torch and are for the training process."""
    found = []
    for path, tree in TREES.items():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        room = name.startswith(("elastic_driver.worker.", "elastic_driver.horovod.torch"))
        classes = any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body)
        if path != SEAMS and room and classes:
            module = importlib.import_module(name)
            found += [each for each in vars(module).values() if is_class_of(module, each)]
    return found


def is_class_of(module: ModuleType, thing: object) -> bool:
    return isinstance(thing, type) and thing.__module__ == module.__name__


def test_no_other_class_replaces_a_private_method_of_torch() -> None:
    for each in our_classes():
        theirs = [base for base in each.__mro__ if base.__module__.startswith("torch")]
        hidden = {name for base in theirs for name in vars(base) if private(name)}
        own = {name for name, value in vars(each).items() if inspect.isfunction(value)}
        assert not hidden & own, each
