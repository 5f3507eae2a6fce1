"""Cross entropy of the next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Target of a token that weighs nothing: the default of `torch.nn.functional.cross_entropy`."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all tokens with a target; a float32 scalar.

    Args:
        logits: [batch, seq, vocab_size].
        targets: int64, [batch, seq], below `vocab_size` or `IGNORE`.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
