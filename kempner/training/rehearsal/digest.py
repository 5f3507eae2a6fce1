"""Short digests of tensors, arrays and states: equal if and only if all bits are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

ROWS = 4096
"""Of how many samples of a batch the digests are kept one by one."""


def of_bytes(*parts: bytes) -> str:
    """Of these bytes, one part after the other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """Of type, shape and bits; of a sharded tensor, of this rank's part."""
    return of_bytes(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), _bits(tensor))


def of_rows(tensor: Tensor) -> list[str]:
    """Of each sample of a batch, or of the whole where there are none."""
    if tensor.dim() == 0 or not 0 < len(tensor) <= ROWS:
        return [of_tensor(tensor)]
    bits = _bits(tensor)
    size = len(bits) // len(tensor)
    return [of_bytes(bits[n * size : (n + 1) * size]) for n in range(len(tensor))]


def of_state(value: Any) -> str:
    """Of a state as `state_dict` returns it: numbers, tensors and containers of them."""
    return of_bytes(*_pieces(value))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in arguments of a call, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []


def _pieces(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        yield of_tensor(value).encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes() if value.dtype != object else repr(value).encode()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield f"{key!r}:".encode()
            yield from _pieces(entry)
    elif isinstance(value, list | tuple):
        yield f"({len(value)}".encode()
        for entry in value:
            yield from _pieces(entry)
    elif isinstance(value, int | float | complex | str | bytes | type(None)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


def _bits(tensor: Tensor) -> bytes:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_meta or local.layout is not torch.strided or local.is_quantized:
        return str(tuple(local.shape)).encode()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    flat = local.cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
