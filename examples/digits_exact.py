"""The same weights, to the last bit, on any number of workers, whenever they come and go.

    python examples/digits_exact.py
    elasticrun -np 3 examples/digits_exact.py       # kill -9 a worker while it trains

Both print the same fingerprint. The job is written for eight virtual workers with a micro-batch
of 16 images each; the real workers share them. Without `deterministic=True` it would be the same
training up to rounding, and faster. The data come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic_driver as elastic


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


parser = argparse.ArgumentParser(description="Train digits to the same bits on any workers.")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
digits = TensorDataset(images, torch.tensor(data.target))
torch.manual_seed(0)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
batches = elastic.FixedBatch(digits, 16, model=model, virtual_workers=8, deterministic=True)
state = elastic.TorchState(
    model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, epoch=0
)


@elastic.run
def train(state: elastic.TorchState) -> None:
    for state.epoch in range(state.epoch, args.epochs):
        batches.set_epoch(state.epoch)
        for step in batches:  # 8 x 16 images, whoever trains them
            for inputs, labels in step:  # this worker's share
                nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            state.commit()


train(state)
if elastic.rank() == 0:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits.tensors[1]).float().mean().item()
    print(f"accuracy {right:.1%}, fingerprint {fingerprint(model)}", flush=True)
