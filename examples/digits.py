"""Handwritten digits on a small convolutional network, with workers that may come and go.

    elasticrun -np 3 examples/digits.py --epochs 10
    python examples/digits.py                       # one worker, without elasticrun

The data (1,797 images of 8 x 8 pixels) come with scikit-learn; nothing is downloaded. Kill a
worker with `kill -9` while it trains, and the others go on. The lines that make a plain training
loop elastic are marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return (train, test), the same split on every worker."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step on each worker")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints, to resume from")
    parser.add_argument("--record", type=Path, help="write a line for each step into this folder")
    return parser.parse_args()


args = arguments()
torch.manual_seed(0)
torch.set_num_threads(1)  # several workers share this machine
train_set, test_set = digits()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic.ElasticSampler(train_set, shuffle=True, seed=0)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

# (1) Everything that has to survive, plain values too. Checkpoints outlive all workers.
durable = {"checkpoint_dir": args.checkpoints, "every": 200} if args.checkpoints else {}
state = elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, **durable
)


def record() -> None:
    """Write a line for each finished step, for measurements (examples/demo.py)."""
    if args.record is not None:
        line = {
            "t": time.time(),
            "step": state.step,
            "round": elastic.round_id(),
            "rank": elastic.rank(),
            "size": elastic.size(),
            "pid": os.getpid(),
        }
        with (args.record / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@elastic.run  # (2) Called again, with the state of the last commit, when the workers change.
def train(state: elastic.TorchState) -> None:
    ddp = elastic.wrap(state.model)  # (3) DistributedDataParallel of the workers there are now.
    ddp.train()
    for state.epoch in range(state.epoch, args.epochs):
        state.sampler.set_epoch(state.epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(ddp(images), labels)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.step += 1
            record()
            if elastic.rank() == 0 and state.step % 25 == 0:
                where = f"epoch {state.epoch} step {state.step}"
                print(f"{where} loss {loss:.3f} workers {elastic.size()}", flush=True)
            state.commit()  # (4) A step boundary: nothing before it is lost.


def accuracy() -> float:
    images, labels = test_set.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


train(state)
if elastic.rank() == 0:
    print(f"done after {state.step} steps: accuracy {accuracy():.1%} on images never seen")
