"""A small character-level transformer that learns to write Python from Python's own library.

    elasticrun -np 2 --max-np 4 examples/char_lm.py --epochs 1

Nothing is downloaded: the text is the source code of the modules in this interpreter's library. The
loop is the one of digits.py; the state also has a learning-rate schedule.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic_driver as elastic

WINDOW = 64  # a prediction sees at most so many characters before it
VOCABULARY = 128  # ASCII; everything else becomes "?"


def library_text(limit: int) -> Tensor:
    """Return the first `limit` characters of the standard library, as a tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(errors="replace").encode("ascii", "replace")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of the text, each with the same window one character later."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // WINDOW

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * WINDOW : (index + 1) * WINDOW + 1].long()
        return window[:-1], window[1:]


class CharModel(nn.Module):
    """A two-layer decoder-only transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        hidden = self.characters(text) + self.places(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def write(model: nn.Module, start: str, length: int) -> str:
    """Return the text with which the model continues `start`."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(start.encode())])
    with torch.no_grad():
        for _ in range(length):
            chances = model(text[:, -WINDOW:])[0, -1].div(0.7).softmax(0)
            text = torch.cat([text, chances.multinomial(1, generator=generator)[None]], dim=1)
    return bytes(text[0].tolist()).decode("ascii", "replace")


parser = argparse.ArgumentParser(description="Teach a small transformer to write Python.")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=32, help="windows a step on each worker")
parser.add_argument("--characters", type=int, default=1_000_000)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
windows = Windows(library_text(args.characters))
model = CharModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
sampler = elastic.ElasticSampler(windows, shuffle=True, seed=0)
loader = DataLoader(windows, batch_size=args.batch_size, sampler=sampler)
state = elastic.TorchState(
    model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0
)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = elastic.wrap(state.model)
    ddp.train()
    for state.epoch in range(state.epoch, args.epochs):
        state.sampler.set_epoch(state.epoch)
        for text, following in loader:
            loss = nn.functional.cross_entropy(ddp(text).flatten(0, 1), following.flatten())
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
            state.step += 1
            if elastic.rank() == 0 and state.step % 50 == 0:
                workers = elastic.size()
                print(f"step {state.step} loss {loss:.3f} workers {workers}", flush=True)
            state.commit()


train(state)
if elastic.rank() == 0:
    print(f"done after {state.step} steps; it writes:\n{write(model, 'def ', 200)}")
