"""Generates text from a model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kempner.model.transformer import Transformer


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Tensor,
    *,
    new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt by sampling.

    Every token is computed from the last `context` ones afresh, without a key-value cache. The
    model's mode is left as it is: call `eval()` first if it has dropout.

    Args:
        model: an unsharded model.
        prompt: int64, [tokens], at least one.
        new_tokens: how many tokens to add.
        context: how many tokens to look back, at most `model.shape.max_seq_len`; the length that
            the model was trained with is best.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample from this many likeliest tokens only; from all when None.
        generator: source of randomness, on the model's device; the global one when None.

    Returns:
        int64, [tokens + new_tokens].
    """
    tokens = prompt
    for _ in range(new_tokens):
        logits = model(tokens[None, -context:])[0, -1]
        tokens = torch.cat((tokens, _draw(logits, temperature, top_k, generator)))
    return tokens


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token id, int64 [1], from the logits [vocab_size] of the last position."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    scaled = logits / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
