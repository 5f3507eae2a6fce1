"""Learning from pairs of answers, by direct preference optimization (DPO, Rafailov et al., "Direct
Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv:2305.18290).

Which documents are a pair `MicroBatch.documents` says. The reference is the model without its
adapter, so that it takes a forward, and no memory for weights of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.data.serve.loader import MicroBatch
from kempner.model.adapter import without_adapter

PAIR_MEANS = ("margin", "accuracy")
"""What a mean over pairs has besides the loss: the margin, and the share of pairs whose margin is
above 0."""


def margins(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """What the policy prefers the chosen answers by: equation 7 of arXiv:2305.18290, of which
    `-logsigmoid` of this is the loss.

    beta ((pi(chosen) - ref(chosen)) - (pi(rejected) - ref(rejected))), the difference of the two
    implicit rewards, of log probabilities in nats, [..., 2], chosen before rejected; gives [...].
    """
    preferred = policy[..., 0] - policy[..., 1]
    return beta * (preferred - (reference[..., 0] - reference[..., 1]))


def count_pairs(documents: Tensor) -> Tensor:
    """Whole pairs in each row, [batch], of the documents of its tokens; a last one without another
    is padding."""
    return (documents.amax(1) + 1).div(2, rounding_mode="floor")


def document_sums(values: Tensor, documents: Tensor) -> Tensor:
    """Sums over each document, [batch, pairs, 2], with room for as many as there could be. Tokens
    are added up in their order, so that a sum does not depend on what else is in a batch.

    Args:
        values: float32, [batch, seq].
        documents: int32, [batch, seq]; -1 in rows without a sample, whose values are 0.
    """
    batch, seq = values.shape
    room = seq + seq % 2
    rows = torch.arange(batch, device=values.device)[:, None]
    at = documents.clamp(min=0) + room * rows
    sums = values.new_zeros(batch * room).index_add(0, at.flatten(), values.flatten())
    return sums.view(batch, -1, 2)


def summed_over_pairs(
    model: nn.Module, micro_batch: MicroBatch, device: torch.device, beta: float
) -> Tensor:
    """The loss in nats and `PAIR_MEANS`, summed over all pairs of a micro batch; float32, [3], of
    which the loss alone has a gradient. `model` has an adapter."""
    tokens = micro_batch.inputs.to(device, non_blocking=True)
    targets = micro_batch.targets.to(device, non_blocking=True)
    attended = micro_batch.documents
    if attended is None:  # a rank without data
        documents = torch.full_like(tokens, -1, dtype=torch.int32)
    else:
        documents = attended = attended.to(device, non_blocking=True)

    def likelihoods() -> Tensor:
        costs = model(tokens, targets, documents=attended, each=True)
        return -document_sums(costs.view_as(targets), documents)

    with torch.no_grad(), without_adapter(model):
        reference = likelihoods()
    margin = margins(likelihoods(), reference, beta)
    pairs = torch.arange(margin.shape[1], device=device) < count_pairs(documents)[:, None]
    known = margin.detach()
    each = torch.stack((-F.logsigmoid(margin), known, (known > 0).float()))
    return each.where(pairs, 0).sum((1, 2))
