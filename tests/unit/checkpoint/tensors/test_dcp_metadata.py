"""`.metadata` of a large world is made in another process, and is the same."""

from __future__ import annotations

import signal
import threading

import psutil
import pytest
from harness import wait_until
from patience import scaled

from kempner.checkpoint.format.shard_plan import TensorSpec
from kempner.checkpoint.tensors import dcp_metadata

SPECS = [TensorSpec(f"model.{n}", (64 + n, 8), "float32", (4,), (0,)) for n in range(50)]


def test_another_process_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dcp_metadata.metadata_of(SPECS, 4)
    monkeypatch.setattr(dcp_metadata, "MADE_HERE", 0)
    made = []
    monkeypatch.setattr(dcp_metadata, "build_metadata", made.append)  # of this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert dcp_metadata.metadata_of(SPECS, 4) == here
    assert not made
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_stop_signal_does_not_end_the_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "MADE_HERE", 0)
    made: list[bytes] = []
    others = psutil.Process().children()
    thread = threading.Thread(target=lambda: made.append(dcp_metadata.metadata_of(SPECS, 4)))
    thread.start()
    born = lambda: [c for c in psutil.Process().children() if c not in others]  # noqa: E731
    (planner,) = wait_until(born, "the planner")
    planner.send_signal(signal.SIGTERM)
    planner.send_signal(signal.SIGINT)
    thread.join(scaled(60))
    assert made == [dcp_metadata.build_metadata(SPECS, 4)]


def test_its_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "MADE_HERE", 0)
    with pytest.raises(RuntimeError, match=r"planning ended with 1: .*no_such_type"):
        dcp_metadata.metadata_of([TensorSpec("model.w", (2,), "no_such_type", (1,), (0,))], 1)
