"""Copies loss and norm of recent steps to the host without making it wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kempner.checkpoint.format.train_state import TrainState
from kempner.training.policy.anomalies import Numbers


@dataclass(frozen=True)
class _Pending:
    train_state: TrainState
    rate: float
    numbers: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> Numbers:
        """Wait for it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm = self.numbers.tolist()
        return Numbers(self.train_state, loss, norm, self.rate)


class AsyncMetrics:
    """Sends loss and gradient norm after each step; tells them in the order of the steps.

    A GPU has not made a step when the host has asked for it. What it came to is told one step
    later, when the GPU has that one to work on: it never idles while the host reads.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def send(self, train_state: TrainState, loss: Tensor, norm: Tensor, rate: float) -> None:
        """A step was asked for, after which the run stands at `train_state`."""
        numbers, arrived = torch.stack([loss.float(), norm.float()]), None
        if numbers.is_cuda:
            numbers = torch.empty(2, pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        self._pending.append(_Pending(train_state, rate, numbers, arrived))

    def arrivals(self, everything: bool) -> Iterator[Numbers]:
        """What has arrived; with `everything`, the newest step is waited for, too."""
        while self._pending:
            oldest = self._pending[0]
            if oldest.arrived is not None and len(self._pending) == 1 and not everything:
                return
            self._pending.popleft()
            yield oldest.read()

    def unseen(self) -> Callable[[], list[Numbers]]:
        """What has not been told yet, for whoever waits for it, on any thread."""
        pending = list(self._pending)
        return lambda: [one.read() for one in pending]

    def forget(self) -> None:
        """What is still on its way concerns steps that do not count any more."""
        self._pending.clear()
