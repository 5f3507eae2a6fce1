"""A device that computes wrong is found by one element of a product, and its node is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kempner.cluster.world import discover
from kempner.run.control.heartbeat import Progress
from kempner.run.process.exit_codes import DataError
from kempner.run.record.events import LedgerEvent
from kempner.run.record.run_dir import RunDirectory
from kempner.training.groups.process_groups import UnfitDeviceError, check_device
from kempner.training.rank_link.rank_link import RankLink

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
    with (
        Flaky(),
        pytest.raises(UnfitDeviceError, match="cpu of node2 computes wrong results: 1 of"),
    ):
        check_device(CPU, "node2")


class RecordedEvents:
    """Stands for the link: keeps what the supervisor is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def record(self, event: LedgerEvent) -> None:
        self.events.append((event.name, event.to_fields()))


def test_the_supervisor_is_told_which_node_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    link = RecordedEvents()
    run = RunDirectory(tmp_path)
    rank_link = RankLink(discover({}), run, None, Progress(), link)  # type: ignore[arg-type]
    check_device(torch.device("cpu"), "node2")
    rank_link.report_unfit_node(DataError("a file is missing, which is no fault of this node's"))
    assert link.events == []
    with Flaky(), pytest.raises(UnfitDeviceError) as raised:
        check_device(torch.device("cpu"), "node2")
    rank_link.report_unfit_node(raised.value)
    assert link.events == [("suspect", {"node": "node2", "reason": str(raised.value)})]
