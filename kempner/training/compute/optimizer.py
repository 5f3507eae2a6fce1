"""Creates the optimizer, and updates the weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.config.sections import OptimizerSection
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.process.exit_codes import UsageError
from kempner.training.compute.adamw import GuardedAdamW
from kempner.training.compute.muon import GuardedMuon, MuonAndAdamW
from kempner.training.compute.sgd import GuardedSGD

T = TypeVar("T")


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """The optimizer that the section asks for; weight decay for matrices only."""
    match section.name:
        case "adamw":
            return _adamw(model.parameters(), section)
        case "muon":
            return _muon(model, section)
        case "sgd":
            return GuardedSGD(
                _groups(model.parameters(), _given(section.weight_decay, 0.0)),
                lr=section.lr,
                momentum=_given(section.momentum, 0.9),
                nesterov=bool(section.nesterov),
            )


def _adamw(parameters: Iterable[Tensor], section: OptimizerSection) -> GuardedAdamW:
    beta1, beta2 = section.betas or (0.9, 0.95)
    return GuardedAdamW(
        _groups(parameters, _given(section.weight_decay, 0.1)),
        lr=section.lr,
        betas=(beta1, beta2),
        eps=_given(section.eps, 1e-8),
        fused=True,
    )


def _muon(model: nn.Module, section: OptimizerSection) -> MuonAndAdamW:
    """Muon for the matrices in `model.layers`, AdamW for embedding, output projection and norms.

    Muon's updates are scaled to the size of AdamW's (Liu et al., "Muon is Scalable for LLM
    Training", arXiv:2502.16982, section 2.2), so that one learning rate serves both.
    """
    hidden: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        inside = name.startswith("layers.") and parameter.ndim == 2
        (hidden if inside else others).append(parameter)
    if not hidden:
        raise UsageError(
            'optimizer.name="muon" updates the matrices in the ModuleList `layers` of the model, '
            "which has none"
        )
    muon = GuardedMuon(
        hidden,
        lr=section.lr,
        weight_decay=_given(section.weight_decay, 0.1),
        momentum=_given(section.momentum, 0.95),
        nesterov=_given(section.nesterov, True),
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAndAdamW(muon, _adamw(others, section))


def _groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def clip_gradients(model: nn.Module, max_norm: float, waiting: Waiting = untimed) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (0: leave them); return the norm.

    The norm is over all ranks' shards, a scalar on the model's device. `waiting` is entered while
    this rank waits for others. As `torch.nn.utils.clip_grad_norm_`, on the shards that it has.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = [local_part(gradient) for gradient in gradients]
    if gradients and is_sharded(gradients[0]):
        squared = _own_share(gradients)
        with waiting("the gradient norm"):
            dist.all_reduce(squared)
        norm = squared.sqrt_()
    else:
        norm = nn.utils.get_total_norm(own)
    if max_norm > 0:
        torch._foreach_mul_(own, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _own_share(gradients: Iterable[Tensor]) -> Tensor:
    """What this rank adds to the squared norm: what several ranks hold, each adds a part of."""
    held: defaultdict[int, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        held[_holders(gradient)].append(local_part(gradient))
    shares = [nn.utils.get_total_norm(own).square_() / ranks for ranks, own in held.items()]
    return torch.stack(shares).sum()


def _holders(gradient: Tensor) -> int:
    """How many ranks hold what this one does of a DTensor."""
    assert is_sharded(gradient)
    sides = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sides if placement.is_replicate())


def update(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Tensor,
    rate: float,
    max_norm: float,
    waiting: Waiting = untimed,
) -> Tensor:
    """One optimizer step, every group's at learning rate `rate`; the norm before clipping.

    If `loss`, of all ranks, or that norm is not finite, nothing changes: neither parameters nor
    optimizer state, counters included. The device decides that, and the host does not wait for it;
    both numbers are sums over all ranks, so every rank decides alike. `waiting` is entered while
    this rank waits for others.
    """
    norm = clip_gradients(model, max_norm, waiting).detach()
    for group in optimizer.param_groups:
        group["lr"] = rate
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]  # fused steps obey it
    optimizer.step()
    optimizer.zero_grad()
    return norm
