"""Imports the weights of a model in safetensors as the first commit of a run.

They become float32, as a run keeps its weights. Memory holds the largest tensor, as it is stored
and as float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kempner.checkpoint.convert.first_commit import NO_ATTEMPT, commit_first
from kempner.checkpoint.convert.safetensors_reader import Located
from kempner.checkpoint.convert.tensor_copy import OnBytes
from kempner.checkpoint.convert.write_listed import write_listed
from kempner.checkpoint.format.contents import Saved
from kempner.checkpoint.format.manifest import Identity, Manifest
from kempner.checkpoint.format.shard_plan import Chunk, Placed, TensorSpec
from kempner.checkpoint.format.train_state import TrainState

_FLOAT32 = "float32"

EXACT = ("float32", "bfloat16", "float16")
"""The types whose numbers float32 holds all."""


@dataclass(frozen=True)
class Weights:
    """The parameters of a model by our names; `rows` is how many each has in the checkpoint.

    Those beyond the stored ones are 0. `model` is what the checkpoint says of the model.
    """

    located: Mapping[str, Located]
    rows: Mapping[str, int]
    model: Mapping[str, Any]

    @property
    def saved(self) -> dict[str, Saved]:
        """What the checkpoint has, by its keys."""
        return {
            f"model.{name}": Saved((self.rows[name], *tensor.shape[1:]), _FLOAT32)
            for name, tensor in self.located.items()
        }


def import_weights(
    weights: Weights, into: Path, train_state: TrainState, on_bytes: OnBytes
) -> Path:
    """Commit the weights as the first checkpoint of the folder `into`; return its path.

    Each safetensors file becomes one of the checkpoint. Raises as `Located.read` and
    `commit_first`.
    """
    saved = weights.saved
    specs = [TensorSpec(key, s.shape, s.dtype, (1,), (None,)) for key, s in saved.items()]
    files: dict[Path, list[Chunk]] = {}
    for name, tensor in weights.located.items():
        shape = saved[f"model.{name}"].shape
        chunk = Chunk(f"model.{name}", (0,) * len(shape), shape, _FLOAT32)
        files.setdefault(tensor.path, []).append(chunk)

    def read(number: int, placed: Sequence[Placed]) -> Iterator[Tensor]:
        for item in placed:
            name = item.chunk.key.removeprefix("model.")
            yield _grown(weights.located[name].read().float(), weights.rows[name])

    def write(path: Path) -> Manifest:
        written = write_listed(path, specs, list(files.values()), read, on_bytes)
        identity = Identity(len(files), {}, None, None, weights.model, optimizer=None)
        return Manifest(train_state, identity, NO_ATTEMPT, time.time(), written)

    return commit_first(into, train_state.step, write)


def _grown(tensor: Tensor, rows: int) -> Tensor:
    """With rows of zeros at its end, as many as are missing."""
    missing = rows - tensor.shape[0]
    if not missing:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))
