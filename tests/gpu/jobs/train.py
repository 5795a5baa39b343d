"""Trains on DEVICE with BACKEND and writes down every finished step.

Every tenth step it writes down a digest of the state, too: that waits for the device, which ranks
that share one take turns to use.

MODE `ddp` (DistributedDataParallel) or `fixed` (a deterministic FixedBatch). SECOND_GROUP=1: there
is another group of all ranks, which is used once in a round and has nothing to do later.
NEWCOMERS_WAIT: seconds that whoever replaces another waits before it joins. The model has some
WIDTH² parameters: the larger, the longer a step is inside the all-reduce. FROZEN_MB: the size of a
parameter that nothing trains, which only newcomers receive. The last line of each worker tells the
digest of model and optimizer, the backend and its threads.
"""

import hashlib
import json
import os
import threading
import time
from pathlib import Path

os.environ["NCCL_HOSTID"] = os.environ["ELASTIC_WORKER_ID"]  # several ranks share one device

import torch
import torch.distributed as dist

import elastic_driver as elastic

DEVICE, BACKEND = os.environ["DEVICE"], os.environ.get("BACKEND") or None
STEPS = int(os.environ.get("STEPS", "100000"))
WIDTH = int(os.environ.get("WIDTH", "64"))
FROZEN_MB = int(os.environ.get("FROZEN_MB", "0"))
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
SECOND_GROUP = os.environ.get("SECOND_GROUP") == "1"
MODE = os.environ.get("MODE", "ddp")
WORKER = os.environ["ELASTIC_WORKER_ID"]
RECORDS = Path(os.environ["STEP_RECORDS"])
DIGESTS = RECORDS.parent / "digests"
LARGE = 10**6  # elements

DIGESTS.mkdir(exist_ok=True)
if len(list(RECORDS.iterdir())) >= int(os.environ["WORLD_SIZE"]):  # others have trained before
    time.sleep(float(os.environ.get("NEWCOMERS_WAIT", "0")))


def watch_frozen():
    """Leave a mark once the state of others begins to arrive."""
    before = model.frozen[0].item()
    while model.frozen[0].item() == before:
        if training.wait(0.01):
            return
    (RECORDS.parent / f"arrives-{os.getpid()}").touch()


training = threading.Event()
elastic.init(backend=BACKEND)
torch.manual_seed(int(os.environ["LOCAL_RANK"]))  # models differ until the state is shared
# Over gloo, the broadcast of its statistics is a wait in C++, which cannot be given up.
norm = torch.nn.BatchNorm1d(WIDTH) if "nccl" in (BACKEND or "nccl") else torch.nn.Identity()
model = torch.nn.Sequential(
    torch.nn.Linear(20, WIDTH),
    norm,
    torch.nn.Linear(WIDTH, WIDTH),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(WIDTH, 1),
).to(DEVICE)
if FROZEN_MB:
    frozen = torch.randn(FROZEN_MB * 2**18, device=DEVICE)
    model.register_parameter("frozen", torch.nn.Parameter(frozen, requires_grad=False))
    threading.Thread(target=watch_frozen, daemon=True).start()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
common = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return torch.randn(20, generator=torch.Generator().manual_seed(index))


def digest():
    """Of what all ranks hold alike: under DDP each has running statistics of its own."""
    found = hashlib.sha256()
    tensors = list(model.state_dict().values() if MODE == "fixed" else model.parameters())
    tensors += [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    for tensor in map(torch.Tensor.detach, tensors):
        if not torch.isfinite(tensor).all():
            return "not finite"
        large = tensor.numel() > LARGE  # the sum of its bits is built on the device
        kept = tensor.view(torch.int32).sum(dtype=torch.int64) if large else tensor
        found.update(kept.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def facts_of_process():
    """What a group that was left may leave behind."""
    free = torch.cuda.mem_get_info()[0] >> 20 if DEVICE == "cuda" else 0
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {"free": free, "rss": rss, "threads": threads, "files": files, "size": elastic.size()}


def note(state):
    facts = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": WORKER,
    }
    if state.step % 10 == 0:
        with (DIGESTS / WORKER).open("a") as file:
            line = {"step": state.step, "digest": digest(), "of": facts_of_process()}
            file.write(json.dumps(line) + "\n")
    with (RECORDS / f"{WORKER}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def loss_of(net, inputs):
    return (net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()


def train_ddp(state):
    training.set()
    ddp = elastic.wrap(state.model)
    if SECOND_GROUP:
        dist.all_reduce(torch.ones(1, device=DEVICE), group=dist.new_group())
    while state.step < STEPS:
        generator = torch.Generator().manual_seed(state.step * 1000 + elastic.rank())
        inputs = torch.randn(16, 20, generator=generator).to(DEVICE)
        optimizer.zero_grad()
        loss_of(ddp, inputs).backward()
        optimizer.step()
        state.step += 1
        time.sleep(STEP_S)
        note(state)
        state.commit()


def train_fixed(state):
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - the state keeps the epoch
        state.batches.set_epoch(state.epoch)
        for step in state.batches:
            for inputs in step:
                loss_of(model, inputs.to(DEVICE)).backward()
            optimizer.step()
            state.step += 1
            time.sleep(STEP_S)
            note(state)
            state.commit()


def use_torch_directly():
    """Collectives of both halves, and of a part of the world; whether all were right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right = []
    for device in {"cpu", DEVICE}:
        values = torch.ones(4, device=device)
        dist.all_reduce(values)
        right.append(bool((values == size).all()))
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    right.append(gathered == list(range(size)))
    part = dist.new_group(list(range(size - 1)))
    if rank < size - 1:
        values = torch.ones(1, device=DEVICE)
        dist.all_reduce(values, group=part)
        right.append(int(values) == size - 1)
    dist.barrier()
    return all(right)


if MODE == "fixed":
    batches = elastic.FixedBatch(Samples(), 5, model=model, virtual_workers=8, deterministic=True)
    state = elastic.TorchState(**common, batches=batches)
    elastic.run(train_fixed)(state)
else:
    state = elastic.TorchState(**common)
    elastic.run(train_ddp)(state)
print(
    f"done step={state.step} digest={digest()} collectives={use_torch_directly()} "
    f"backend={dist.get_backend()} threads={threading.active_count()}",
    flush=True,
)
