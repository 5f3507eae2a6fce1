"""A device that computes wrong is found by one element of a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kempner.training.selfcheck import UnfitDeviceError, check_device

CPU = torch.device("cpu")


class Flaky(TorchFunctionMode):
    """Products in float32 have one wrong bit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.matmul and result.dtype is torch.float32:
            result[3, 5] += 1
        return result


def test_a_device_that_computes_right_passes() -> None:
    check_device(CPU, "node2")


def test_one_wrong_element_is_enough() -> None:
    with Flaky(), pytest.raises(UnfitDeviceError, match="cpu of node2 computes wrong: 1 of"):
        check_device(CPU, "node2")
