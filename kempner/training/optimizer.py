"""The optimizer, and one update of the weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from kempner.config.sections import OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """AdamW (fused kernels); weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    beta1, beta2 = section.betas
    return AdamW(
        [
            {"params": matrices, "weight_decay": section.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=section.lr,
        betas=(beta1, beta2),
        eps=section.eps,
        fused=True,
    )


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (0: leave them); return the norm.

    The norm is over all ranks' shards, a scalar on the model's device.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def update(model: nn.Module, optimizer: Optimizer, rate: float, max_norm: float) -> Tensor:
    """One optimizer step at learning rate `rate`; returns the gradient norm before clipping."""
    norm = clip_gradients(model, max_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm.detach()
