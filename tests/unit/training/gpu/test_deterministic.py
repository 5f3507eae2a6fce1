"""What `train.deterministic` sets before a rank does anything with a device."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kempner.training import main


class StoppedError(Exception):
    """The rank came to its first use of a device."""


@pytest.mark.parametrize("asked", [False, True])
def test_cublas_gets_its_workspace_before_a_device_is_touched(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    found: list[str | None] = []

    def touch(*args: object) -> None:
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise StoppedError

    monkeypatch.setattr(main, "arm", touch)
    config = main.Config.model_validate({"train": {"deterministic": asked}})
    link = cast(Any, SimpleNamespace(world=SimpleNamespace(local_size=1), run=None, progress=None))
    with pytest.raises(StoppedError):
        main.run_rank(config, link, cast(Any, None))
    assert found == [":4096:8" if asked else None]
