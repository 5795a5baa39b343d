"""The transformer that a node check trains on random data, as large as the device has room for.

Sizes are GPT-2's (Radford et al. 2019, table 2); on a CPU a small one that takes seconds. There is
no optimizer: parameters, gradients and activations load the device and the links as training does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

MEMORY_SHARE = 0.85  # of a device's free memory that may be used
_BYTES = 4  # single precision
_KEPT_PER_TOKEN = 20  # activations kept for the backward pass, in units of the width, per layer
_LOGIT_COPIES = 4  # logits, their softmax, gradients
_RESERVE = 512 * 1024 * 1024  # of a device: library workspaces, the matrices, the exchange


@dataclass(frozen=True)
class ModelSize:
    """Shape of a decoder-only transformer and of its random batch."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # in a sequence
    batch: int = 1

    @property
    def parameters(self) -> int:
        """Return the number of parameters: embeddings (shared with the output) and blocks."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.tokens + 2) * self.width

    @property
    def needed(self) -> int:
        """Return the bytes of parameters, gradients (which are DDP's buckets) and activations."""
        token = _KEPT_PER_TOKEN * self.width + 2 * self.heads * self.tokens
        activations = self.layers * self.tokens * token
        logits = _LOGIT_COPIES * self.tokens * self.vocabulary
        return _BYTES * (2 * self.parameters + self.batch * (activations + logits))


SMALLEST = ModelSize("on a CPU", 2, 128, 4, 1000, 64, batch=2)
SIZES = (
    SMALLEST,
    ModelSize("124M", 12, 768, 12, 50257, 512),
    ModelSize("355M", 24, 1024, 16, 50257, 512),
    ModelSize("774M", 36, 1280, 20, 50257, 512),
    ModelSize("1.5B", 48, 1600, 25, 50257, 512),
)


def largest_that_fits(free: int) -> int:
    """Return the index in SIZES of the largest model for `free` bytes; 0 always fits."""
    fitting = [i for i, s in enumerate(SIZES) if s.needed + _RESERVE <= MEMORY_SHARE * free]
    return max(fitting, default=0)


class Transformer(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Token and position embeddings, pre-norm blocks with causal attention, shared output."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        shape = size.width, size.heads, 4 * size.width
        block = nn.TransformerEncoderLayer(*shape, 0.0, "gelu", batch_first=True, norm_first=True)
        norm = self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.TransformerEncoder(block, size.layers, norm, enable_nested_tensor=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean loss of predicting each next token; `batch`: (sequences, tokens)."""
        places = torch.arange(batch.shape[1], device=batch.device)
        hidden = self.tokens(batch) + self.positions(places)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=batch.device)
        logits = nn.functional.linear(self.blocks(hidden, mask, is_causal=True), self.tokens.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
