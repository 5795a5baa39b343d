"""A forked worker trains: torch works in it as in a new process, and at once."""

from __future__ import annotations

import asyncio
import os
import socket
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.agent.processes import start_fresh
from tests.launcher.agent.warm.harness import Agent, Outcome, agent, pipes, read_all, wait_for

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One warm parent for all tests here: each writes the script before its workers start."""
    with agent(tmp_path_factory.mktemp("torch")) as fake:
        fake.launch("job.py", preload=["torch"])
        yield fake


def script(host: Agent, source: str) -> None:
    (host.cwd / "job.py").write_text(textwrap.dedent(source))


def run_warm(host: Agent, **variables: str) -> Outcome:
    assert host.warm, host.said
    outcome = host.run("job.py", **variables)
    assert host.said == [], "it was not a fork"
    return outcome


STEP = """
    import sys
    before = set(sys.modules)
    import torch
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    print(model.weight.isfinite().all().item(), len(set(sys.modules) - before))
"""


def test_without_a_rehearsal_only_the_modules_are_there(tmp_path: Path) -> None:
    source = "import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    (tmp_path / "job.py").write_text(source)
    with agent(tmp_path) as fake:
        plan = replace(fake.plan("job.py", preload=["torch"]), rehearse=False)
        fake.starter.launch(plan)
        asyncio.run(fake.starter.ready())
        assert fake.run("job.py") == Outcome("True False\n", "", 0)


def test_the_first_step_needs_no_further_import(host: Agent) -> None:
    script(host, STEP)
    assert run_warm(host) == Outcome("True 0\n", "", 0)


def test_siblings_draw_different_numbers_as_new_processes_do(host: Agent) -> None:
    script(
        host,
        """
        import random, numpy, torch
        print(torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random())
        """,
    )
    first, second = (run_warm(host).stdout.split() for _ in range(2))
    assert len(first) == 4
    assert not set(first) & set(second)


@pytest.mark.slow
def test_a_seed_gives_the_same_numbers_as_in_a_new_process(host: Agent) -> None:
    script(
        host,
        """
        import random, numpy, torch
        torch.manual_seed(1); numpy.random.seed(1); random.seed(1)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        print(model.weight.tolist(), numpy.random.rand(), random.random())
        """,
    )
    assert run_warm(host) == host.run_fresh("job.py")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, "1", "2"])
def test_thread_pools_have_the_size_that_the_worker_asks_for(
    host: Agent, threads: str | None
) -> None:
    script(
        host,
        """
        import ctypes, os, numpy, torch
        a = torch.ones(700, 700)
        (a @ a).relu().sum()
        pools = [torch.get_num_threads()]
        for line in open("/proc/self/maps"):
            if "openblas" in line:
                library = ctypes.CDLL(line.split()[5])
                pools.append(library.scipy_openblas_get_num_threads64_())
        print(sorted(set(pools)), numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum())
        """,
    )
    variables = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert run_warm(host, **variables) == host.run_fresh("job.py", **variables)


@pytest.mark.parametrize("threads", ["4096", "2,1", "none"])
def test_pools_that_torch_might_size_otherwise_start_fresh(host: Agent, threads: str) -> None:
    try:
        script(host, "import os; print(os.environ['OMP_NUM_THREADS'])")
        outcome = host.run("job.py", OMP_NUM_THREADS=threads)
        assert (outcome.stdout, outcome.code) == (f"{threads}\n", 0)
        host.starter._said.clear()
        assert "OMP_NUM_THREADS differs" in host.said[0]
    finally:
        host.said.clear()


@pytest.mark.slow
def test_data_loader_workers_can_be_forked_and_spawned(host: Agent) -> None:
    script(
        host,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor(float(i)).sqrt()

        if __name__ == "__main__":
            torch.ones(2, requires_grad=True).sum().backward()
            for method in "fork", "spawn":
                loader = DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context=method)
                print(method, torch.cat(list(loader)).sum().item())
        """,
    )
    outcome = run_warm(host)
    assert outcome == Outcome("fork 13.47757339477539\nspawn 13.47757339477539\n", "", 0)


def run_two(host: Agent) -> list[str]:
    """What two ranks of the script print, who may form a gloo world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with pipes() as (first, second):
        pids = []
        for rank, (_, write) in enumerate((first, second)):
            spec = host.spec("job.py", out=write, err=write, RANK=str(rank), **world)
            pids.append(host.starter.start(spec))
            os.close(write)
        texts = read_all(first[0], second[0])
        assert [wait_for(pid) for pid in pids] == [0, 0], texts
    assert host.said == [], "they were no forks"
    return texts


def test_workers_form_a_gloo_world_and_train_with_ddp(host: Agent) -> None:
    script(
        host,
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        print(total.item(), [round(w, 6) for w in model.module.weight.flatten().tolist()])
        dist.destroy_process_group()
        """,
    )
    texts = run_two(host)
    assert texts[0] == texts[1]
    assert texts[0].startswith("1.0 [")


def test_a_ddp_object_that_outlives_its_group_does_not_lock_up(host: Agent) -> None:
    script(
        host,
        """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        rank = int(os.environ["RANK"])
        def train(meeting):
            dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
            dist.destroy_process_group()
        for n in range(20):
            train(f"file://{os.getcwd()}/meeting.{n}")
        print("ended")
        """,
    )
    assert run_two(host) == ["ended\n", "ended\n"]


def test_most_of_its_memory_is_shared_with_its_siblings(host: Agent) -> None:
    script(
        host,
        textwrap.dedent(STEP)
        + textwrap.dedent("""
        for line in open("/proc/self/smaps_rollup"):
            if line.startswith(("Rss", "Pss:", "Private")):
                print(*line.split()[:2])
        """),
    )
    lines = (line.split() for line in run_warm(host).stdout.splitlines()[1:])
    sizes = {name.rstrip(":"): int(kilobytes) for name, kilobytes in lines}
    assert sizes["Private_Dirty"] < sizes["Rss"] / 2


@pytest.mark.slow
def test_an_error_in_training_shows_the_same_traceback(host: Agent) -> None:
    script(host, "import torch\ndef f():\n    torch.ones(2) @ torch.ones(3)\nf()\n")
    warm = run_warm(host)
    assert warm == host.run("job.py", start=start_fresh)
    assert warm.code == 1
