"""A model of your own: kempner supervise --nproc 2 own_model.toml"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Mixes each token with a decaying memory of those before it."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, window, groups=width, padding=window - 1)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        past = self.mix(self.norm(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(torch.nn.functional.gelu(self.up(past)))


class Memory(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab_size]."""

    def __init__(self, vocab_size: int, width: int, depth: int, window: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width, window) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def build(options: Mapping[str, Any], vocab_size: int) -> nn.Module:
    """What `model.factory` names; `options` is the table `[model.options]`."""
    return Memory(vocab_size, options["width"], options.get("depth", 2), options.get("window", 8))
