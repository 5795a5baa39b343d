"""The transformer a node check trains on made-up data, as large as the device has room for.

Only `task` uses it. Sizes are GPT-2's (Radford et al. 2019, table 2); on a CPU a small one
that takes seconds. There is no optimizer: parameters, gradients and activations are what it
takes to load the device and the links as training does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROOM = 0.85  # the share of a device's free memory that may be used
_BYTES = 4  # single precision
_KEPT_PER_TOKEN = 20  # activations kept for the backward pass, in units of the width, per layer
_LOGIT_COPIES = 4  # logits, their softmax, gradients
_RESERVE = 512 * 1024 * 1024  # of a device: library workspaces, the matrices, the exchange


@dataclass(frozen=True)
class Size:
    """Shape of a decoder-only transformer and of its made-up batch."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # in a sequence
    batch: int = 1

    @property
    def parameters(self) -> int:
        """How many numbers it learns: embeddings (shared with the output) and blocks."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.tokens + 2) * self.width

    @property
    def needed(self) -> int:
        """Bytes for parameters, gradients (which are DDP's buckets) and activations."""
        activations = (
            self.layers
            * self.tokens
            * (_KEPT_PER_TOKEN * self.width + 2 * self.heads * self.tokens)
        )
        logits = _LOGIT_COPIES * self.tokens * self.vocabulary
        return _BYTES * (2 * self.parameters + self.batch * (activations + logits))


SMALLEST = Size("on a CPU", 2, 128, 4, 1000, 64, batch=2)
SIZES = (
    SMALLEST,
    Size("124M", 12, 768, 12, 50257, 512),
    Size("355M", 24, 1024, 16, 50257, 512),
    Size("774M", 36, 1280, 20, 50257, 512),
    Size("1.5B", 48, 1600, 25, 50257, 512),
)


def largest_that_fits(free: int) -> int:
    """The index in SIZES of the largest model for so many free bytes; 0 always fits."""
    fitting = [i for i, size in enumerate(SIZES) if size.needed + _RESERVE <= ROOM * free]
    return max(fitting, default=0)


class Transformer(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Token and position embeddings, pre-norm blocks with causal attention, shared output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(_Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean loss of predicting each next token; `batch`: token numbers, (sequences, tokens)."""
        places = torch.arange(batch.shape[1], device=batch.device)
        hidden = self.tokens(batch) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits = nn.functional.linear(self.norm(hidden), self.tokens.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class _Block(nn.Module):  # type: ignore[misc]
    """Attention over earlier tokens, then a feed-forward layer; both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, width = hidden.shape
        parts = self.attention(self.before(hidden)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return hidden + self.feed(self.between(hidden))
