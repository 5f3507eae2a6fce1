"""A lack of memory is told as what it is, and nothing else is taken for it."""

from __future__ import annotations

import re

import pytest
import torch

from kempner.run.control.heartbeat import Progress
from kempner.run.control.protocol import Phase
from kempner.training.main import describe_shortage

TOLD = (
    r"out of memory in phase eval after step 41: this rank has \d+\.\d GiB, "
    r"\d+\.\d GiB of the host's \d+\.\d GiB are available; ask for more memory, or lower "
)


def told(error: BaseException) -> str | None:
    progress = Progress()
    progress.made(41)
    progress.phase = Phase.EVAL
    return describe_shortage(error, progress)


def test_of_python_and_of_torch_on_the_host() -> None:
    with pytest.raises(MemoryError) as python:
        bytearray(1 << 60)
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 58, dtype=torch.uint8)
    for error in (python.value, of_torch.value):
        sentence = told(error)
        assert sentence is not None
        assert re.match(TOLD, sentence)


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("memory")])
def test_nothing_else(error: Exception) -> None:
    assert told(error) is None
