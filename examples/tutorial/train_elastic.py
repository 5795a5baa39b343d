"""The script of train.py made elastic: workers may fail, come and go while it trains.

    elasticrun -np 3 train_elastic.py

docs/tutorial.md explains each change.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)  # several workers share this machine
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
digits = TensorDataset(images, torch.tensor(data.target))

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = elastic.ElasticSampler(digits)
loader = DataLoader(digits, batch_size=32, sampler=sampler)
state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = elastic.wrap(state.model)
    for state.epoch in range(state.epoch, args.epochs):
        state.sampler.set_epoch(state.epoch)
        loss = None  # if the workers changed after the last step of an epoch, nothing is left of it
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x), y)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            elastic.report_progress(loss=loss.item())
            state.commit()
        if elastic.rank() == 0 and loss is not None:
            print(f"epoch {state.epoch}: loss {loss:.3f}, {elastic.size()} workers", flush=True)


train(state)
