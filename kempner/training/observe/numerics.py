"""Records what steps compute: for each micro batch the output of every module and its gradient, for
each parameter its gradient, its update and its new value. `kempner replay --trace` asks for it.

Outputs are seen by forward hooks, their gradients by hooks of the tensors: both only look. What a
block computes again for its backward is left out. Blocks that are compiled are seen from outside,
since a hook within would keep them from being compiled whole. So the bits of a step stay the same.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kempner.checkpoint.format.shard_plan import chunk_of
from kempner.checkpoint.tensors.file_buffer import tensor_specs
from kempner.checkpoint.tensors.state import local_part
from kempner.config.sections import ProfilingSection
from kempner.data.order.shuffle import SampleOrder
from kempner.data.serve.loader import StepBatch
from kempner.run.output.logs import logger
from kempner.training.compute.fingerprint import fingerprint, text_of
from kempner.training.groups.process_groups import Ranks
from kempner.training.observe.metrics import finite_or_none

ROOT = "model"
"""The name of the model itself; its output is the loss, or the logits of a model of the user's."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Of the elements of a tensor, or of a shard of it: the sum of squares, the largest absolute
    value, the fingerprint."""

    squares: float
    largest: float
    bits: int

    def __add__(self, other: Figures) -> Figures:
        """Those of two shards together."""
        largest = max(self.largest, other.largest)
        return Figures(self.squares + other.squares, largest, self.bits + other.bits)

    def to_line(self) -> Line:
        """For a line: nine digits of the norm, which no order of the sum changes."""
        norm = math.sqrt(self.squares) if self.squares >= 0 else math.nan
        return {
            "norm": float(f"{norm:.9g}") if math.isfinite(norm) else None,
            "max": self.largest if math.isfinite(self.largest) else None,
            "fingerprint": text_of(self.bits),
        }


@dataclass(frozen=True)
class _Measured:
    """Figures that are still on the device."""

    numbers: Tensor
    bits: Tensor

    @classmethod
    def of(cls, tensor: Tensor, offsets: Sequence[int] | None = None) -> _Measured:
        """`offsets` is where it begins in the tensor that it is a part of."""
        local = local_part(tensor)
        wide = local.double()
        largest = wide.abs().amax() if local.numel() else wide.sum()
        return cls(torch.stack((wide.square().sum(), largest)), fingerprint(local, offsets))

    def read(self) -> Figures:
        squares, largest = self.numbers.tolist()
        return Figures(squares, largest, int(self.bits))


@dataclass(frozen=True)
class _MicroBatch:
    """What one forward and backward has shown, in the order in which it came."""

    outputs: list[tuple[str, _Measured]] = field(default_factory=list)
    gradients: list[tuple[str, _Measured]] = field(default_factory=list)

    def lines(self) -> list[Line]:
        kinds = {"output": self.outputs, "gradient": self.gradients}
        return [
            {"kind": kind, "module": name, **measured.read().to_line()}
            for kind, seen in kinds.items()
            for name, measured in seen
        ]


class Numerics:
    """Appends the lines of each step from `section.numerics_from` on to the file
    `section.numerics`, from rank 0. Call `before_update` and `after_update` around each update, on
    all ranks."""

    def __init__(
        self, section: ProfilingSection, model: nn.Module, ranks: Ranks, micro_steps: int, step: int
    ) -> None:
        assert section.numerics is not None
        self._file, self._from = Path(section.numerics), section.numerics_from or 1
        self._model, self._ranks, self._next = model, ranks, step + 1
        # Those of a step that was called off are pushed out by the next one's.
        self._seen = deque[_MicroBatch](maxlen=micro_steps)
        self._moved: dict[str, tuple[Tensor, Sequence[int], Tensor, _Measured]] = {}
        model.register_forward_pre_hook(self._begin)
        for name, module in _seen_from_outside(model):
            module.register_forward_hook(partial(self._look, name or ROOT))

    def before_update(self) -> None:
        """Measure the gradients of a step, before they are clipped; keeps a copy of the weights."""
        if not self._on:
            return
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        world = self._ranks.world
        for name, spec in zip(trained, tensor_specs(trained, world.size), strict=True):
            chunk, parameter = chunk_of(spec, world.rank), trained[name]
            if chunk is not None and parameter.grad is not None:
                gradient = _Measured.of(parameter.grad, chunk.offsets)
                before = local_part(parameter).clone()
                self._moved[name] = parameter, chunk.offsets, before, gradient

    def after_update(
        self, step: int, batch: StepBatch, order: SampleOrder, numbers: Mapping[str, Tensor | float]
    ) -> None:
        """Write what step `step` on `batch` came to; `numbers` are its loss, norm and rate."""
        if self._on:
            own = self._micro_batches(batch, order), list(self._parameters())
            gathered: list[Any] | None = None
            if self._ranks.world.rank == 0:
                gathered = [None] * self._ranks.world.size
            dist.gather_object(own, gathered, group=self._ranks.votes, group_dst=0)
            if gathered is not None:
                self._write(
                    step, {k: finite_or_none(float(v)) for k, v in numbers.items()}, gathered
                )
        self._moved, self._next = {}, step + 1
        self._seen.clear()

    @property
    def _on(self) -> bool:
        return self._next >= self._from

    def _begin(self, *_: object) -> None:
        if self._on and _is_training():
            self._seen.append(_MicroBatch())

    def _look(self, name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if not self._on or not _is_training():
            return
        now = self._seen[-1]
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(tensors):
            if tensor.is_floating_point():
                label = name if len(tensors) == 1 else f"{name}[{number}]"
                now.outputs.append((label, _Measured.of(tensor)))
                if tensor.requires_grad:
                    hook = partial(_note_gradient, now, label)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _micro_batches(
        self, batch: StepBatch, order: SampleOrder
    ) -> list[tuple[list[int], list[Line]]]:
        """The positions of each micro batch that has any, and its lines."""
        found, size = [], len(batch.micro[0].inputs)
        for number, seen in enumerate(self._seen):
            positions = batch.positions[number * size :][:size]
            if positions:
                samples = [order.locate(position)[1] for position in positions]
                first = {"kind": "batch", "positions": positions, "samples": samples}
                found.append((positions, [self._place() | line for line in [first, *seen.lines()]]))
        return found

    def _place(self) -> Line:
        degrees, rank = self._ranks.degrees, self._ranks.world.rank
        part = {"part": degrees.tensor_rank(rank)} if degrees.tensor > 1 else {}
        return {"rank": rank, **part}

    def _parameters(self) -> Iterator[tuple[str, dict[str, Figures]]]:
        """This rank's part of each parameter; what ranks hold alike is one rank's."""
        for name, (parameter, offsets, before, gradient) in self._moved.items():
            after = local_part(parameter)
            measured = {
                "gradient": gradient,
                "update": _Measured.of(after - before, offsets),
                "weight": _Measured.of(after, offsets),
            }
            yield name, {kind: one.read() for kind, one in measured.items()}

    def _write(self, step: int, numbers: Line, gathered: Sequence[Any]) -> None:
        lines = lines_of_step(
            [micro for micros, _ in gathered for micro in micros],
            [own for _, parameters in gathered for own in parameters],
            [name for name, _ in self._model.named_parameters()],
        )
        head = {"kind": "step", **numbers, "lines": len(lines)}
        text = "".join(json.dumps({"step": step, **line}) + "\n" for line in [head, *lines])
        try:
            with self._file.open("a") as file:
                file.write(f"\n{text}")  # a kill may have torn the line before
        except OSError as error:
            logger().warning(f"what step {step} computed cannot be written", error=str(error))


def lines_of_step(
    micros: Sequence[tuple[list[int], list[Line]]],
    parameters: Sequence[tuple[str, Mapping[str, Figures]]],
    names: Sequence[str],
) -> list[Line]:
    """The lines of a step: micro batches in the order of their samples, by which they are numbered,
    then the parameters in the order of `names`, each the sum over its shards."""
    lines, numbers = [], dict[int, int]()
    for positions, own in sorted(micros, key=lambda micro: micro[0][0]):
        number = numbers.setdefault(positions[0], len(numbers))
        lines += [{"kind": line["kind"], "micro_batch": number, **line} for line in own]
    whole: dict[str, dict[str, Figures]] = {name: {} for name in names}
    for name, part in parameters:
        known = whole[name]
        for kind, figures in part.items():
            known[kind] = known[kind] + figures if kind in known else figures
    for name, figures_of in whole.items():
        entries = {kind: figures.to_line() for kind, figures in figures_of.items()}
        if entries:  # it trains
            lines.append({"kind": "parameter", "parameter": name, **entries})
    return lines


def _seen_from_outside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but those within a compiled block."""
    named = list(model.named_modules())
    compiled = [f"{name}." for name, module in named if getattr(module, "compiled", None)]
    return [(name, module) for name, module in named if not name.startswith(tuple(compiled))]


def _is_training() -> bool:
    """Whether this is a forward with gradients, and not one that a backward computes again."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _note_gradient(seen: _MicroBatch, name: str, gradient: Tensor) -> None:
    seen.gradients.append((name, _Measured.of(gradient)))
