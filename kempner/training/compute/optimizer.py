"""Creates the optimizer, gives each step its learning rate, and updates the weights: AdamW, Muon or
SGD on the shards of each rank.

All obey `found_inf`, as torch's fused ones do: where it is 1, on the device, a step changes
nothing. Torch wraps the methods of its optimizers to keep `torch.compile` out of them, and the
first call of a wrapped one imports the compiler: half as much work as importing torch. Nothing is
compiled here, so these are the same methods without the wrappers.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) makes the momentum of a matrix
orthogonal, which takes the whole matrix. `torch.optim.Muon` refuses the shards of FSDP2, so a step
over shards is made here: of every few matrices each rank gets one whole, makes it orthogonal, and
hands the rows back. Every matrix is worked on once, and no rank holds more than one at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from kempner.checkpoint.tensors.state import is_sharded, local_part, local_parts
from kempner.config.sections import OptimizerSection, SchedulerSection
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.process.exit_codes import UsageError
from kempner.training.compute.any_shard import exact_norm, whole_vectors


def learning_rate(step: int, peak: float, max_steps: int, schedule: SchedulerSection) -> float:
    """The rate for step 1 ... `max_steps`.

    Linear warm-up over `warmup_steps` reaches `peak` at its last step. Then: `constant` stays;
    `linear` and `cosine` (half a period, as in SGDR, arXiv:1608.03983) fall to
    `min_lr_ratio * peak` at `max_steps`; `wsd` (warm-up, stable, decay, as in MiniCPM,
    arXiv:2404.06395) stays and falls linearly over the last `decay_steps`.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    floor = schedule.min_lr_ratio
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (1 - (1 - floor) * progress)
        case "cosine":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "wsd":
            decay = schedule.decay_steps or max(1, max_steps // 10)
            progress = max(0.0, (step - (max_steps - decay)) / decay)
            return peak * (1 - (1 - floor) * progress)


class UncompiledOptimizer(Optimizer):
    """To be inherited before an optimizer of torch."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)


class GuardedAdamW(UncompiledOptimizer, AdamW):
    """`torch.optim.AdamW` with its fused kernel, bit for bit; where `found_inf` is 1, a step
    changes nothing.

    Elements are updated one by one, so the kernel gets plain tensors: for DTensors torch would work
    out at the first step how each operation is to be sharded, which is half of a warm start.
    """

    found_inf: Tensor | None = None
    any_shard = False
    """Whether an element's bits are the same in every shard; otherwise the last ones differ."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("GuardedAdamW takes no closure")
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            gradients = local_parts(parameter.grad for parameter in moved)
            parameters, averages, squares, steps = self.columns(moved)
            self.move(group, gradients, [parameters, averages, squares, steps])

    def columns(self, moved: Sequence[Tensor]) -> list[list[Tensor]]:
        """What a step changes of some parameters: this rank's parts of them and of both moments,
        and the numbers of their steps."""
        states = [self.state[p] or self._begin_state(p) for p in moved]
        return [
            local_parts(moved),
            local_parts(state["exp_avg"] for state in states),
            local_parts(state["exp_avg_sq"] for state in states),
            [state["step"] for state in states],
        ]

    @torch.no_grad()
    def move(
        self, group: Mapping[str, Any], gradients: list[Tensor], columns: Sequence[list[Tensor]]
    ) -> None:
        """Make a step of what `columns` gives, or of copies."""
        parameters, averages, squares, steps = columns
        tensors = parameters, gradients, averages, squares
        if not self.any_shard:
            self._move(group, tensors, steps)
            return
        with whole_vectors(*tensors) as filled:
            more = [steps[0].clone() for _ in filled[0][len(steps) :]]
            self._move(group, filled, [*steps, *more])

    def _move(
        self, group: Mapping[str, Any], tensors: Sequence[list[Tensor]], steps: list[Tensor]
    ) -> None:
        """Update tensors of parameters, given their gradients and both moments."""
        parameters, gradients, averages, squares = tensors
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _begin_state(self, parameter: Tensor) -> dict[str, Any]:
        """The entries that `torch.optim.AdamW` keeps, under its names; zeros at first."""
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state


class MuonAndAdamW(UncompiledOptimizer):
    """Two optimizers as one: their groups in one list, their state in one table."""

    found_inf: Tensor | None = None

    def __init__(self, muon: GuardedMuon, adamw: GuardedAdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = (muon, adamw)
        self.state = muon.state = adamw.state = defaultdict(dict)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A step of both. Raises `ValueError` for a closure, which would have to run twice."""
        if closure is not None:
            raise ValueError("MuonAndAdamW takes no closure")
        for part in self._parts:
            part.found_inf = self.found_inf
            part.step()


class GuardedMuon(UncompiledOptimizer, Muon):
    """`torch.optim.Muon`, bit for bit, for matrices that are whole, or sharded by rows over one
    mesh dimension, and the same along others; where `found_inf` is 1, parameters and momentum stay
    what they are. Every rank makes the same steps, since the ranks exchange rows in them."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("GuardedMuon takes no closure")
        for group in self.param_groups:
            # Matrices of one size go together, so that no rank waits for another's larger one.
            ordered = sorted(group["params"], key=lambda p: p.numel(), reverse=True)
            ranks = _row_group(ordered[0])
            world = 1 if ranks is None else dist.get_world_size(ranks)
            for first in range(0, len(ordered), world):
                self._update(ordered[first : first + world], group, ranks)

    def _update(
        self,
        matrices: Sequence[Tensor],
        group: Mapping[str, Any],
        ranks: dist.ProcessGroup | None,
    ) -> None:
        directions = orthogonalise(
            [self._direction(matrix, group) for matrix in matrices],
            [matrix.shape for matrix in matrices],
            ranks,
            lambda whole: _zeropower_via_newtonschulz(
                whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
            ),
        )
        decay = 1 - group["lr"] * group["weight_decay"]
        for matrix, direction in zip(matrices, directions, strict=True):
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
            local = local_part(matrix)
            local.mul_(self._unless_skipped(decay, 1.0))
            local.add_(self._unless_skipped(direction, 0.0), alpha=-rate)

    def _direction(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This rank's rows of what is to be made orthogonal; moves the momentum."""
        assert matrix.grad is not None  # every matrix takes part in every backward
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        momentum = local_part(state["momentum_buffer"])
        # A gradient that equals the momentum does not move it.
        gradient = self._unless_skipped(local_part(matrix.grad), momentum)
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _unless_skipped(self, value: Tensor | float, otherwise: Tensor | float) -> Any:
        """`value`, or `otherwise` in a step that is to change nothing; chosen on the device."""
        if self.found_inf is None:
            return value
        return torch.where(self.found_inf.bool(), otherwise, value)


def _row_group(matrix: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold a matrix between them, by rows; None if this one has all of it. Where
    there are several such groups, as in HSDP, each does the same."""
    if not is_sharded(matrix):
        return None
    (cut,) = (level for level, way in enumerate(matrix.placements) if way.is_shard())
    group: dist.ProcessGroup = matrix.device_mesh.get_group(cut)
    return group


def orthogonalise(
    rows: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    ranks: dist.ProcessGroup | None,
    iterate: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Apply `iterate` to whole matrices whose rows are spread over the ranks of a group.

    Matrix i is put together on rank i, and there are no more matrices than ranks. They travel as
    bfloat16, the type in which `iterate` works.

    Args:
        rows: this rank's rows of every matrix, [n, columns], cut as `torch.chunk` does.
        shapes: of the whole matrices.
        ranks: all of whose ranks call this alike; None where the matrices are whole.
        iterate: bfloat16 matrix to bfloat16 matrix of the same shape; may overwrite its input.

    Returns:
        This rank's rows of every result, bfloat16.
    """
    if ranks is None:
        return [iterate(part.bfloat16()) for part in rows]
    rank, world = dist.get_rank(ranks), dist.get_world_size(ranks)
    given = [part.numel() for part in rows] + [0] * (world - len(rows))
    taken = _lengths(shapes[rank], world) if rank < len(shapes) else [0] * world
    sent = torch.cat([part.bfloat16().flatten() for part in rows])
    whole = sent.new_empty(sum(taken))
    dist.all_to_all_single(whole, sent, taken, given, group=ranks)
    if rank < len(shapes):
        whole = iterate(whole.view(shapes[rank])).flatten()
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, whole, given, taken, group=ranks)
    returned = torch.split(back, given[: len(rows)])
    return [part.view_as(own) for part, own in zip(returned, rows, strict=True)]


def _lengths(shape: torch.Size, world: int) -> list[int]:
    from torch.distributed.tensor import Shard

    cut = (Shard.local_shard_size_and_offset(shape[0], world, rank) for rank in range(world))
    return [height * shape[1] for height, _ in cut]


class GuardedSGD(UncompiledOptimizer, SGD):
    """`torch.optim.SGD` with its fused kernel; where `found_inf` is 1, a step changes nothing.
    Elements are updated one by one, so each rank updates the shards that it has: the kernel itself
    does not take DTensors."""

    found_inf: Tensor | None = None
    any_shard = False
    """As `GuardedAdamW.any_shard`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("GuardedSGD takes no closure")
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            gradients = local_parts(parameter.grad for parameter in moved)
            self.move(group, gradients, self.columns(moved))

    def columns(self, moved: Sequence[Tensor]) -> list[list[Tensor]]:
        """What a step changes of some parameters: this rank's parts of them, and of the momentum if
        there is any."""
        found = [local_parts(moved)]
        if any(group["momentum"] for group in self.param_groups):
            found.append([self._momentum(parameter) for parameter in moved])
        return found

    @torch.no_grad()
    def move(
        self, group: Mapping[str, Any], gradients: list[Tensor], columns: Sequence[list[Tensor]]
    ) -> None:
        """Make a step of what `columns` gives, or of copies."""
        parameters, *momentum = columns
        tensors = [parameters, gradients, *momentum]
        if not self.any_shard:
            self._move(group, tensors)
            return
        with whole_vectors(*tensors) as filled:
            self._move(group, filled)

    def _move(self, group: Mapping[str, Any], tensors: Sequence[list[Tensor]]) -> None:
        """Update tensors of parameters, given their gradients and, if there is any, momentum."""
        parameters, gradients, *momentum = tensors
        buffers: list[Tensor | None] = [*momentum[0]] if momentum else [None] * len(parameters)
        sgd(
            parameters,
            gradients,
            buffers,
            fused=True,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )

    def _momentum(self, parameter: Tensor) -> Tensor:
        """This rank's part of the momentum. It begins as zeros: the kernel would take uninitialised
        memory for it after a first step that was called off."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return local_part(state["momentum_buffer"])


T = TypeVar("T")


def build_optimizer(
    model: nn.Module, section: OptimizerSection, any_shard: bool = False
) -> Optimizer:
    """The optimizer that the section asks for, of what trains; weight decay for matrices only. With
    `any_shard` an AdamW or SGD gives an element the same bits however it is sharded."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match section.name:
        case "adamw":
            by_adamw = _adamw(trained, section)
            by_adamw.any_shard = any_shard
            return by_adamw
        case "muon":
            return _muon(model, section)
        case "sgd":
            by_sgd = GuardedSGD(
                _groups(trained, _given(section.weight_decay, 0.0)),
                lr=section.lr,
                momentum=_given(section.momentum, 0.9),
                nesterov=bool(section.nesterov),
            )
            by_sgd.any_shard = any_shard
            return by_sgd


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
    Training", arXiv:2502.16982, section 2.2), so that one learning rate serves both."""
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


def clip_gradients(
    model: nn.Module, max_norm: float, waiting: Waiting = untimed, any_shard: bool = False
) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (0: leave them); return the norm.
    The norm is over all ranks' shards, a scalar on the model's device. `waiting` is entered while
    this rank waits for others. As `torch.nn.utils.clip_grad_norm_`, on the shards that it has;
    with `any_shard` by `exact_norm`."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = local_parts(gradients)
    if any_shard:
        with waiting("the gradient norm"):
            norm = exact_norm(own, _row_group(gradients[0]))
    elif gradients and is_sharded(gradients[0]):
        # What several ranks hold, each adds a part of.
        held: defaultdict[int, list[Tensor]] = defaultdict(list)
        for gradient, part in zip(gradients, own, strict=True):
            assert is_sharded(gradient)
            sides = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            held[math.prod(size for size, way in sides if way.is_replicate())].append(part)
        shares = [nn.utils.get_total_norm(part).square_() / n for n, part in held.items()]
        squared = torch.stack(shares).sum()
        with waiting("the gradient norm"):
            dist.all_reduce(squared)
        norm = squared.sqrt_()
    else:
        norm = nn.utils.get_total_norm(own)
    clip_to(own, norm, max_norm)
    return norm


def clip_to(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients, in place, so that their `norm` is at most `max_norm` (0: leave them)."""
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def update(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Tensor,
    rate: float,
    max_norm: float,
    waiting: Waiting = untimed,
    any_shard: bool = False,
) -> Tensor:
    """One optimizer step, every group's at learning rate `rate`; the norm before clipping.

    If `loss`, of all ranks, or that norm is not finite, nothing changes: neither parameters nor
    optimizer state, counters included. The device decides that, and the host does not wait for it;
    both numbers are sums over all ranks, so every rank decides alike. `waiting` is entered while
    this rank waits for others, and `any_shard` is that of `clip_gradients`.
    """
    norm = clip_gradients(model, max_norm, waiting, any_shard).detach()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.found_inf = found_inf(loss, norm)  # type: ignore[attr-defined]  # fused steps obey it
    optimizer.step()
    optimizer.zero_grad()
    return norm


def found_inf(loss: Tensor, norm: Tensor) -> Tensor:
    """1 where a step is to change nothing, else 0."""
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    return 1 - finite.all().float()
