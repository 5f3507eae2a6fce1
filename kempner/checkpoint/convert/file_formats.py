"""Creates files of other formats with space for tensors that are written later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from kempner.checkpoint.convert.tensor_copy import Slot, dtype_of, length
from kempner.checkpoint.format.contents import Saved
from kempner.run.process.exit_codes import DataError

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
) -> list[Slot]:
    """Create a safetensors file for `tensors`, called as `names` says by key; where they go.

    The format is eight bytes with the header's length, the header in JSON, and the tensors without
    gaps (https://github.com/huggingface/safetensors, "Format"). Its own library writes a file only
    from tensors that are all in memory. Raises `DataError` for a dtype that the format lacks.
    """
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
        Slot(key, len(before) + start, saved)
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


def lay_out_torch(path: Path, tensors: Mapping[str, Saved], facts: Mapping[str, int]) -> list[Slot]:
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
        Slot(key, reader.get_record_offset(f"data/{number}"), tensors[key])
        for number, key in enumerate(saved_in_order)
    ]


def _leaves(nested: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors in the order in which `torch.save` meets, and numbers, them."""
    for value in nested.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, Tensor):
            yield value
