"""Runs a training step on tensors without memory, on one rank of a world that is not there."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.config.sections import Config
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import assemble
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import accumulate
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.plan.fake_ranks import fake_ranks
from kempner.training.plan.recorder import Recorder
from kempner.training.plan.timeline import (
    ACTIVATIONS,
    BACKWARD,
    LOSS,
    NOT_THERE,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Place,
    Trace,
    Traced,
    extrapolate,
    whole,
)

_CPU = torch.device("cpu")
_MICRO_STEPS = 3
"""The first one of a step, one between, and the last one."""


@dataclass(frozen=True)
class Step:
    """What is to be traced.

    `config.train.dtype` is the type to compute in, and not "auto". `micro_steps` are those of one
    step. `fused_norms`: count RMSNorm as the one kernel that it is on a GPU.
    """

    config: Config
    vocab_size: int
    mesh: MeshDegrees
    choice: Choice
    micro_steps: int
    fused_norms: bool


def traced(step: Step) -> Traced:
    """Memory, operations and communication of the first rank, which has the largest shards.

    Of a deep model two shallow ones are traced, and the rest follows; but not with Muon.
    """
    layers = step.config.model.n_layers
    period = step.config.train.activation_checkpointing_every or 1
    fewest = 3 + 2 * period
    shorter = fewest + (layers - fewest) % period
    # Muon deals the matrices out to the ranks, and whether they come out even depends on the depth.
    if shorter + period >= layers or step.config.optimizer.name == "muon":
        return whole(trace(step, layers), step.micro_steps)
    pair = trace(step, shorter), trace(step, shorter + period)
    return extrapolate(*pair, layers, step.micro_steps)


def trace(step: Step, layers: int) -> Trace:
    """The second step of a run, whose optimizer has its state, with so many layers."""
    config = _with_layers(step.config, layers)
    train = config.train
    with fake_ranks(step.mesh) as mesh, _undisturbed():
        names = {str(mesh.get_group(name).group_name): name for name in mesh.mesh_dim_names or ()}
        recorder = Recorder(lambda group: names.get(group, "world"))
        # Where the ranks are is computed with tensors, too, and those must be real.
        model = assemble(config, step.vocab_size, torch.device("meta"), mesh, step.choice)
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            model.to_empty(device=_CPU)
            recorder.label(map(local_part, model.parameters()), PARAMETERS)
            optimizer = build_optimizer(model, config.optimizer)
            tokens = torch.zeros(train.micro_batch_size, train.seq_len, dtype=torch.int64)
            if config.data.document_mask and not step.fused_norms:
                model.document_end = 0
            run = partial(_step, step, model, optimizer, MicroBatch(tokens, tokens.clone()))
            run(1)
            recorder.label(_state_of(optimizer), OPTIMIZER)
            marks = _Marks(recorder, layers, step.fused_norms)
            marks.attach(model)
            run(min(step.micro_steps, _MICRO_STEPS), marks)
            segments = recorder.segments()
        return Trace(layers, segments, _saved_bytes(model, optimizer))


def _step(
    step: Step,
    model: nn.Module,
    optimizer: Optimizer,
    batch: MicroBatch,
    micro_steps: int,
    marks: _Marks | None = None,
) -> None:
    """As the loop makes one."""
    if marks is not None:
        marks.begin("start", None)
    loss = accumulate(
        model,
        [batch] * micro_steps,
        device=_CPU,
        seed=0,
        step=1,
        rank=0,
        copies=step.mesh.tensor,
        choice=step.choice,
    )
    if marks is not None:
        marks.update()
    update(model, optimizer, loss, rate=1e-3, max_norm=step.config.train.clip_grad_norm)


class _Marks:
    """Tells a recorder where a step is: by hooks, which change nothing of what is computed."""

    def __init__(self, recorder: Recorder, layers: int, fused_norms: bool) -> None:
        self._recorder, self._layers, self._fused_norms = recorder, layers, fused_norms
        self._micro_step = -1

    def attach(self, model: Transformer) -> None:
        """Hook into the blocks, the whole and the norms."""
        model.register_forward_pre_hook(self._forward, prepend=True)
        model.register_forward_hook(self._loss)
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(self._block, number), prepend=True)
            block.register_forward_hook(partial(self._after_block, number))
        if self._fused_norms:
            for norm in (m for m in model.modules() if isinstance(m, nn.RMSNorm)):
                self._fuse(norm)

    def begin(self, stage: Any, block: int | None) -> None:
        """A part of the step."""
        kinds = {"forward": ACTIVATIONS, "backward": BACKWARD}
        kind = kinds.get(stage, OTHER)
        if stage == "forward" and block is None:
            kind = LOSS
        self._recorder.mark(Place(stage, max(self._micro_step, 0), block), kind)

    def update(self) -> None:
        """All micro steps are done."""
        self._recorder.keep_gradients()
        self._recorder.mark(Place("update"), OTHER)

    def _forward(self, module: nn.Module, inputs: object) -> None:
        self._recorder.keep_gradients()
        self._micro_step += 1
        self.begin("forward", -1)

    def _block(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.begin("forward", number)
        if number == 0:
            inputs[0].register_hook(self._in_backward(-1))  # type: ignore[no-untyped-call]

    def _after_block(self, number: int, module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(self._in_backward(number))  # type: ignore[no-untyped-call]
        if number == self._layers - 1:
            self.begin("forward", None)

    def _loss(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(self._in_backward(None))  # type: ignore[no-untyped-call]

    def _in_backward(self, block: int | None) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self.begin("backward", block)

        return hook

    def _fuse(self, norm: nn.Module) -> None:
        """Of what a norm's forward makes, one kernel leaves the output, and a scale a row."""
        since = 0

        def before(module: nn.Module, inputs: object) -> None:
            nonlocal since
            since = self._recorder.met

        def after(module: nn.Module, inputs: object, output: Tensor) -> None:
            local = _local(output)
            scales = 4 * local.numel() // local.shape[-1]
            self._recorder.relabel_since(since, NOT_THERE, more_than=scales, but=local)

        norm.register_forward_pre_hook(before)
        norm.register_forward_hook(after)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if is_sharded(tensor) else tensor


def _with_layers(config: Config, layers: int) -> Config:
    model = config.model.model_copy(update={"n_layers": layers})
    return config.model_copy(update={"model": model})


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        yield from (_local(value) for value in entries.values() if isinstance(value, Tensor))


def _saved_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What a checkpoint of all ranks holds."""
    optimized = (value for state in optimizer.state.values() for value in state.values())
    saved = [*model.state_dict().values(), *optimized]
    return sum(t.numel() * t.element_size() for t in saved if isinstance(t, Tensor))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Memory is given back when nobody refers to it, and not at times of the collector's own."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Of a tensor group's embedding; nothing is done to it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield
    finally:
        if was_enabled:
            gc.enable()
