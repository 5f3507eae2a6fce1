"""What a state dict may hold, and how it becomes bytes that can be read without running code.

`torch.save` writes it, and `torch.load(weights_only=True)` reads it. NumPy's arrays and numbers,
sets and deques, which that does not read, are written as what it does.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kempner.run.process.exit_codes import DataError, UsageError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_KIND = "kempner:kind"


def encode(value: object, where: str) -> bytes:
    """A copy of `value`, as it is at this moment. Raises `UsageError` for what cannot be held.

    `where` is how the user would write it, for the message.
    """
    buffer = io.BytesIO()
    torch.save(_outward(value, where), buffer)
    return buffer.getvalue()


def decode(content: bytes, where: str) -> Any:
    """What was encoded. Raises `DataError` for anything else."""
    try:
        return _inward(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error


def _outward(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _refused(where, "an array of objects")
        kind = "array" if isinstance(value, np.ndarray) else "number"
        content = {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes()}
        return {_KIND: kind, **content}
    if isinstance(value, Mapping):
        pairs = [(_key(key, where), _outward(v, f"{where}[{key!r}]")) for key, v in value.items()]
        return {"kempner:kind": "mapping", "pairs": pairs} if _KIND in value else dict(pairs)
    if isinstance(value, set | frozenset | deque):
        kind = type(value).__name__
        listed = sorted(value, key=repr) if not isinstance(value, deque) else list(value)
        most = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {_KIND: kind, "items": _outward(listed, where), **most}
    if isinstance(value, list | tuple):
        items = [_outward(item, f"{where}[{at}]") for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, _PLAIN):
        return value
    raise _refused(where, f"of type {type(value).__name__}")


def _tensor(value: Tensor, where: str) -> Tensor:
    if hasattr(value, "device_mesh"):
        raise _refused(where, "sharded: register the module or optimizer that it belongs to")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise _refused(where, f"a tensor without memory of its own ({value.layout})")
    return value.detach().to("cpu", copy=True).contiguous()


def _key(key: Any, where: str) -> Any:
    if isinstance(key, bool | int | float | str | tuple | type(None)):
        return key
    raise _refused(where, f"a dict with a key of type {type(key).__name__}")


def _refused(where: str, what: str) -> UsageError:
    return UsageError(
        f"{where} is {what}, and a checkpoint only holds tensors, NumPy arrays, numbers, strings "
        "and lists, tuples, sets and dicts of those; leave it out of what state_dict() returns"
    )


def _inward(value: Any) -> Any:
    if isinstance(value, dict):
        if (make := _MAKE.get(value.get(_KIND))) is not None:
            return make(value)
        return {key: _inward(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_inward, value)) if type(value) in (list, tuple) else value
    return value


def _array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(value["bytes"], np.dtype(value["dtype"]))
    return flat.reshape(value["shape"]).copy()


_MAKE: dict[object, Callable[[dict[str, Any]], Any]] = {
    "array": _array,
    "number": lambda value: _array(value)[()],
    "mapping": lambda value: {key: _inward(item) for key, item in value["pairs"]},
    "set": lambda value: set(_inward(value["items"])),
    "frozenset": lambda value: frozenset(_inward(value["items"])),
    "deque": lambda value: deque(_inward(value["items"]), value["maxlen"]),
}
