"""Generates text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kempner.model.transformer import KVCache, Transformer

_COLD = 1e-5
"""Temperatures below this leave one token, and soon nothing but infinities."""


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Tensor,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """The tokens that a model adds to a prompt, without end.

    Each costs the forward of one token, since keys and values are cached. Once `context` tokens are
    held, the oldest quarter of them is forgotten and the others are read again. The model's mode is
    left as it is: call `eval()` first if it has dropout.

    Args:
        model: an unsharded model.
        prompt: int64, [tokens], at least one, on the model's device.
        context: how many tokens to look back, at most `model.shape.max_seq_len`; the length that
            the model was trained with is best.
        temperature: divides the logits; 0, or less than 1e-5, always takes the likeliest token.
        top_k: sample from this many likeliest tokens only; from all when None.
        top_p: sample from the likeliest tokens only that have this probability together.
        generator: source of randomness, on the model's device; the global one when None.
    """
    tokens = prompt[-context:]
    cache = _empty_cache(model, context)
    while True:
        logits = model(tokens[None], cache=cache)[0, -1]
        drawn = _draw(logits, temperature, top_k, top_p, generator)
        yield int(drawn)
        tokens = torch.cat((tokens, drawn))
        if tokens.numel() > context:
            tokens = tokens[max(1, context // 4) :]
            cache = _empty_cache(model, context)


def _empty_cache(model: Transformer, context: int) -> list[KVCache]:
    return [KVCache(context) for _ in model.layers]


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator | None,
) -> Tensor:
    """One token id, int64 [1], from the logits [vocab_size] of the last position."""
    if temperature < _COLD:
        return logits.argmax(keepdim=True)
    scaled = (logits - logits.max()) / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ranked, ids = probabilities.sort(descending=True)
        unneeded = ranked.cumsum(-1) - ranked >= top_p  # the tokens before have it already
        unneeded[0] = False
        probabilities[ids[unneeded]] = 0.0
    return torch.multinomial(probabilities, 1, generator=generator)
