"""Device check: a small computation with a known result."""

from __future__ import annotations

import torch

from kempner.run.process.exit_codes import UnfitNodeError

SIZE = 256
"""Rows of the matrices: enough to use every part of a GPU that multiplies, a moment on a CPU."""


class UnfitDeviceError(UnfitNodeError):
    """The device computes something else than what is right."""


def check_device(device: torch.device, node: str) -> None:
    """Multiply matrices of small integers on `device`, which is exact in float32 and in TF32.

    Products of numbers up to 7 sum up to less than 2^24, so that no order of addition rounds.
    Raises `UnfitDeviceError`; whatever the device itself raises passes through.
    """
    rows, columns = torch.arange(SIZE).unsqueeze(1), torch.arange(SIZE).unsqueeze(0)
    left, right = (3 * rows + 5 * columns) % 8, (7 * rows + columns * columns) % 8
    expected = left.to(torch.float64) @ right.to(torch.float64)
    got = left.to(device, torch.float32) @ right.to(device, torch.float32)
    wrong = int((got.cpu().to(torch.float64) != expected).sum())
    if wrong:
        raise UnfitDeviceError(
            f"{device} of {node} computes wrong results: {wrong} of {SIZE * SIZE} product elements "
            "are wrong"
        )
