"""A plain DistributedDataParallel script, for any number of workers that stay the same.

    torchrun --nproc-per-node 2 train.py

docs/tutorial.md makes an elastic script of it: train_elastic.py.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)  # several workers share this machine
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
digits = TensorDataset(images, torch.tensor(data.target))


def train() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, batch_size=32, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, {dist.get_world_size()} workers", flush=True)


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
