"""Imports the weights of a model in safetensors as the first commit of a run.

They become float32, as a run keeps its weights. Memory holds the largest tensor, as it is stored
and as float32.

The format is eight bytes with the header's length, the header in JSON, and the tensors without
gaps (https://github.com/huggingface/safetensors, "Format"). Its own library maps whole files, whose
pages would count as memory.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.checkpoint.convert.first_commit import commit_first, write_listed
from kempner.checkpoint.convert.tensor_copy import INDEX, SAFETENSORS_DTYPES, WHOLE, OnBytes, octets
from kempner.checkpoint.format.contents import Saved, are_numbers
from kempner.checkpoint.format.manifest import NO_ATTEMPT, Identity, Manifest, TrainState
from kempner.checkpoint.format.shard_plan import Chunk, Placed, TensorSpec
from kempner.run.process.exit_codes import DataError, cannot_read

_LARGEST_HEADER = 100_000_000  # bytes; the library refuses more, too
_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class TensorLocation:
    """A tensor in a file: `start` is its first byte, `dtype` torch's name."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor. Raises `DataError` if the file has become shorter, and as `cannot_read`."""
        tensor = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                count = file.readinto(octets(tensor))
        except OSError as error:
            raise cannot_read(self.path, error) from error
        if count < tensor.nbytes:
            end = self.start + tensor.nbytes
            raise DataError(f"{self.path} ends before byte {end}; copy it again")
        return tensor


def find_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Every tensor of a model in a folder, by name. That are those of
    `model.safetensors.index.json`, or of `model.safetensors`. Raises `DataError` for what is
    missing or damaged, and as `cannot_read`."""
    if not (folder / INDEX).is_file():
        return _header(folder / WHOLE)
    placed = _json(folder / INDEX, (folder / INDEX).read_bytes()).get("weight_map")
    if not isinstance(placed, Mapping) or not all(
        isinstance(file, str) and Path(file).name == file for file in placed.values()
    ):
        raise DataError(f"{folder / INDEX} is damaged: it does not say where the weights are")
    files = {file: _header(folder / file) for file in sorted(set(placed.values()))}
    for name, file in placed.items():
        if name not in files[file]:
            raise DataError(f"{folder / file} does not have {name}, which {INDEX} says it has")
    return {name: files[file][name] for name, file in placed.items()}


def _header(path: Path) -> dict[str, TensorLocation]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LARGEST_HEADER):
                raise DataError(f"{path} is damaged or cut off: its header does not fit into it")
            header = _json(path, file.read(length))
    except OSError as error:
        advice = "name a folder with a model in safetensors, as Hugging Face has them"
        raise cannot_read(path, error, advice) from error
    try:
        return {
            name: _located(path, 8 + length, size, **entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged or cut off: its header makes no sense") from error


def _located(
    path: Path, begin: int, size: int, dtype: str, shape: Any, data_offsets: Any
) -> TensorLocation:
    """A tensor as the header says; raises `ValueError`, `TypeError` or `KeyError` for nonsense."""
    first, end = data_offsets
    ours = _DTYPES[dtype]
    width = getattr(torch, ours).itemsize
    if not are_numbers([*shape, first, end]) or end - first != math.prod(shape) * width:
        raise ValueError("a tensor without its bytes")
    if begin + end > size:
        raise ValueError("a tensor beyond the end")
    return TensorLocation(path, begin + first, ours, tuple(shape))


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise DataError(f"{path} is damaged: it is not a table")
    return table


_FLOAT32 = "float32"

EXACT = ("float32", "bfloat16", "float16")  # the types whose numbers float32 holds all


@dataclass(frozen=True)
class Weights:
    """The parameters of a model by our names; `rows` is how many each has in the checkpoint. Those
    beyond the stored ones are 0. `model` is what the checkpoint says of the model."""

    located: Mapping[str, TensorLocation]
    rows: Mapping[str, int]
    model: Mapping[str, Any]

    @property
    def saved(self) -> dict[str, Saved]:
        return {
            f"model.{name}": Saved((self.rows[name], *tensor.shape[1:]), _FLOAT32)
            for name, tensor in self.located.items()
        }


def import_weights(
    weights: Weights, into: Path, train_state: TrainState, on_bytes: OnBytes
) -> Path:
    """Commit the weights as the first checkpoint of the folder `into`; return its path. Each
    safetensors file becomes one of the checkpoint. Raises as `TensorLocation.read` and
    `commit_first`."""
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
