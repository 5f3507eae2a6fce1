"""Copies whole tensors and whole files of a checkpoint into files of other formats."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from kempner.checkpoint.format.contents import Contents, Saved
from kempner.checkpoint.format.manifest import Manifest, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.file_writer import reserve, write_all, write_from
from kempner.checkpoint.io.verify import Cursor, VerifiedFile, read_whole
from kempner.checkpoint.store.selection import read_base
from kempner.checkpoint.tensors.load import fill, open_contents
from kempner.run.process.durable_io import write_durable
from kempner.run.process.exit_codes import DataError

BATCH_BYTES = 256 << 20
"""Tensors that are read together, so that small ones do not cost a file opened each."""

OnBytes = Callable[[int], None]  # told how many bytes more of tensors are done


@dataclass(frozen=True)
class TensorSlot:
    """Where in a file the bytes of the tensor `key` begin, and as what it is written there. It may
    be of another floating-point type than in the checkpoint, and without the last rows."""

    key: str
    at: int
    written: Saved


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from; of one that holds an adapter, `base` has the model's weights."""

    path: Path
    manifest: Manifest
    contents: Contents
    base: Source | None = None

    @classmethod
    def open(cls, checkpoint: Path) -> Source:
        """Raises `DataError` if the checkpoint is damaged where it describes itself, or the one
        with the weights that it needs is not there."""
        manifest, base = read(checkpoint), None
        if (named := manifest.identity.base) is not None:
            folder = CheckpointFolder(checkpoint.parent)
            read_base(folder, named)
            base = cls.open(folder.step(named.step))
        return cls(checkpoint, manifest, open_contents(checkpoint, manifest), base)

    @cached_property
    def tensors(self) -> Mapping[str, Saved]:
        """All that it has, and of its base the model."""
        of_base = {} if self.base is None else self.base.contents.tensors
        model = {key: saved for key, saved in of_base.items() if key.startswith("model.")}
        return {**model, **self.contents.tensors}

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the order of `keys`. Raises `DataError` for what is damaged."""
        for batch in self._batches(keys):
            table = {key: _empty(self.tensors[key]) for key in batch}
            self.fill(table)
            for key in batch:
                yield key, table.pop(key)  # so that two batches are never in memory

    def fill(self, table: Mapping[str, Tensor]) -> None:
        """As `tensors.load.fill`, each tensor from where it is."""
        own = {key: tensor for key, tensor in table.items() if key in self.contents.tensors}
        fill(own, self.path, self.manifest, self.contents)
        if self.base is not None and len(own) < len(table):
            self.base.fill({key: tensor for key, tensor in table.items() if key not in own})

    def _batches(self, keys: Iterable[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        held = 0
        for key in keys:
            size = length(self.tensors[key])
            if batch and held + size > BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(key)
            held += size
        if batch:
            yield batch


@dataclass(frozen=True)
class Merged(Source):
    """A checkpoint that holds an adapter, as the one model that computes the same, to rounding:
    each weight W with its pair is W + scale B A."""

    @classmethod
    def of(cls, source: Source) -> Self:
        return cls(source.path, source.manifest, source.contents, source.base)

    @cached_property
    def tensors(self) -> Mapping[str, Saved]:
        assert self.base is not None  # an adapter has one
        return {k: s for k, s in self.base.contents.tensors.items() if k.startswith("model.")}

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        scale = (self.manifest.identity.adapter or {})["scale"]
        for key, tensor in super().read(keys):
            pair = [f"{key.removesuffix('.weight')}.{which}" for which in ("lora_A", "lora_B")]
            if pair[0] in self.contents.tensors:
                a, b = (_empty(self.contents.tensors[name]) for name in pair)
                self.fill(dict(zip(pair, (a, b), strict=True)))
                tensor = tensor + (b @ a) * scale
            yield key, tensor


def length(saved: Saved) -> int:
    return math.prod(saved.shape) * dtype_of(saved).itemsize


def dtype_of(saved: Saved) -> torch.dtype:
    dtype = getattr(torch, saved.dtype)
    assert isinstance(dtype, torch.dtype)  # checked when the contents were described
    return dtype


def total(tensors: Mapping[str, Saved]) -> int:
    return sum(map(length, tensors.values()))


def pour(path: Path, slots: Sequence[TensorSlot], source: Source, on_bytes: OnBytes) -> None:
    """Write tensors into their slots of the file at `path`, which has its length; fsync it. Raises
    `DataError` for damage in the checkpoint and `OSError` for what cannot be written."""
    places = {slot.key: slot for slot in slots}
    with open(path, "r+b", buffering=0) as file:
        reserve(file.fileno(), os.fstat(file.fileno()).st_size)
        for key, tensor in source.read(places):
            slot = places[key]
            write_all(file.fileno(), octets(_fitted(tensor, slot.written)), slot.at)
            on_bytes(tensor.nbytes)
        os.fsync(file.fileno())


def octets(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fitted(tensor: Tensor, written: Saved) -> Tensor:
    """The tensor in the type, and without the last rows, in which it is written."""
    if tuple(tensor.shape) != written.shape:
        tensor = tensor[: written.shape[0]]
    return tensor.to(dtype_of(written))


def _empty(saved: Saved) -> Tensor:
    return torch.empty(saved.shape, dtype=dtype_of(saved))


def copy_data_file(
    checkpoint: Path, manifest: Manifest, name: str, target: Path, on_bytes: OnBytes
) -> None:
    """Copy a file that has checksums by block, and fsync it. Raises `DataError` for a damaged
    block, and `OSError` for what cannot be written."""
    file = VerifiedFile(checkpoint / name, manifest.files[name], manifest.files)
    with Cursor(file) as cursor:

        def read(slab: memoryview, start: int) -> None:
            cursor.fill(slab, start // file.block_bytes)
            on_bytes(len(slab))

        write_from(target, file.sums.bytes, read)


def copy_small_file(checkpoint: Path, manifest: Manifest, name: str, target: Path) -> None:
    """Copy a file that has one checksum, and fsync it; raises as `copy_data_file`."""
    write_durable(target, read_whole(checkpoint / name, manifest.files[name]))


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def lay_out_safetensors(
    path: Path, tensors: Mapping[str, Saved], names: Mapping[str, str]
) -> list[TensorSlot]:
    """Create a safetensors file for `tensors`, called as `names` says by key; where they go. The
    format is eight bytes with the header's length, the header in JSON, and the tensors without gaps
    (https://github.com/huggingface/safetensors, "Format"). Its own library writes a file only from
    tensors that are all in memory. Raises `DataError` for a dtype that the format lacks."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for key, saved in tensors.items():
        if saved.dtype not in SAFETENSORS_DTYPES:
            raise DataError(f"{key} is {saved.dtype}, which safetensors does not have")
        ends.append(ends[-1] + length(saved))
        header[names[key]] = {
            "dtype": SAFETENSORS_DTYPES[saved.dtype],
            "shape": saved.shape,
            "data_offsets": ends[-2:],
        }
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)  # so that every tensor is aligned for its dtype
    before = len(described).to_bytes(8, "little") + described
    with open(path, "xb") as file:
        file.write(before)
        file.truncate(len(before) + ends[-1])
    return [
        TensorSlot(key, len(before) + start, saved)
        for (key, saved), start in zip(tensors.items(), ends, strict=False)
    ]


def shard(tensors: Mapping[str, Saved], largest: int) -> list[dict[str, Saved]]:
    """Tensors in as few groups, in order, as hold `largest` bytes each, or one larger tensor."""
    shards: list[dict[str, Saved]] = [{}]
    held = 0
    for key, saved in tensors.items():
        size = length(saved)
        if shards[-1] and held + size > largest:
            shards.append({})
            held = 0
        shards[-1][key] = saved
        held += size
    return shards


def lay_out_torch(
    path: Path, tensors: Mapping[str, Saved], facts: Mapping[str, int]
) -> list[TensorSlot]:
    """Create the file that `torch.save` makes of a nested state; where its tensors go.

    `model.<name>` goes to `["model"][name]`, `optimizer.<name>.<entry>` to
    `["optimizer"][name][entry]`; `facts` lie beside them. `torch.load(weights_only=True)` reads it.
    The checksums that the zip format keeps per entry are not those of the tensors; torch does not
    look at them, other programs may warn.
    """
    nested: dict[str, Any] = {"model": {}, "optimizer": {}, **facts}
    with FakeTensorMode():
        fakes = {key: torch.empty(s.shape, dtype=dtype_of(s)) for key, s in tensors.items()}
    for key, fake in fakes.items():
        kind, _, name = key.partition(".")
        if kind == "optimizer":
            parameter, _, entry = name.rpartition(".")
            nested[kind].setdefault(parameter, {})[entry] = fake
        else:
            nested[kind][name] = fake
    with open(path, "xb") as file, skip_data(materialize_fake_tensors=True):
        torch.save(nested, file)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    keys = {id(fake): key for key, fake in fakes.items()}
    saved_in_order = (keys[id(fake)] for fake in _leaves(nested))
    return [
        TensorSlot(key, reader.get_record_offset(f"data/{number}"), tensors[key])
        for number, key in enumerate(saved_in_order)
    ]


def _leaves(nested: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors in the order in which `torch.save` meets, and numbers, them."""
    for value in nested.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, Tensor):
            yield value
