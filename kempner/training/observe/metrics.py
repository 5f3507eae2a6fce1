"""Records metrics and sample ids of each step, and shows progress.

Copies loss and norm of recent steps to the host without making it wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kempner.checkpoint.format.manifest import TrainState
from kempner.config.sections import Config
from kempner.model.spec.step_time import peak_flops_of
from kempner.run.control.heartbeat import StepDelays
from kempner.run.record.ledger import JsonlWriter
from kempner.run.record.run_dir import RunDirectory
from kempner.training.observe.progress_bar import Display
from kempner.training.policy.anomalies import Numbers


@dataclass(frozen=True)
class _Pending:
    train_state: TrainState
    rate: float
    numbers: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> Numbers:
        """The numbers, once they have arrived."""
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
        """Reads the numbers that were not returned yet, and may wait for them on any thread."""
        pending = list(self._pending)
        return lambda: [one.read() for one in pending]

    def forget(self) -> None:
        """What is still on its way concerns steps that do not count any more."""
        self._pending.clear()


class StepMetrics:
    """Rank 0 writes metrics.jsonl and talks to the terminal; with `log_samples` a rank writes its
    samples.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        *,
        attempt: int,
        rank: int,
        log_samples: bool,
        flops_per_second_at_peak: float | None,
        flops_per_token: float,
        display: Display,
    ) -> None:
        self._config, self._attempt, self._rank = config, attempt, rank
        self._metrics = JsonlWriter(run.metrics)
        self._samples = JsonlWriter(run.samples(rank)) if log_samples else None
        self._peak, self._flops_per_token = flops_per_second_at_peak, flops_per_token
        self._display, self._echo = display, AsyncMetrics()
        self._logged = time.monotonic(), 0
        self._held_up = StepDelays()
        self._losses: dict[str, float] = {}

    def start(self, train_state: TrainState) -> None:
        """Count time and tokens from here; what came before does not count."""
        self._echo.forget()
        self._logged = time.monotonic(), train_state.tokens

    def record(
        self,
        train_state: TrainState,
        loss: Tensor,
        norm: Tensor,
        rate: float,
        positions: Sequence[int],
        held_up: StepDelays,
    ) -> None:
        """Take note of a step that was asked for, and of the positions that this rank took.

        `held_up` is what has held up this rank since the step before.
        """
        self._held_up += held_up
        if self._samples is not None:
            place = {"step": train_state.step, "attempt": self._attempt, "rank": self._rank}
            self._samples.append({**place, "samples": list(positions)})
        self._echo.send(train_state, loss, norm, rate)

    def arrivals(self, everything: bool) -> Iterator[Numbers]:
        """What is known by now of the steps recorded, each told once; the metrics get it, too.

        With `everything` the device is waited for. All ranks get the same steps and the same
        losses, to the bit: a sum over ranks is made in one place and handed to all.
        """
        for numbers in self._echo.arrivals(everything):
            self._losses["loss"] = numbers.loss
            if (
                self._rank == 0
                and numbers.train_state.step % self._config.metrics.log_interval == 0
            ):
                self._log(numbers)
            yield numbers

    def unseen(self) -> Callable[[], list[Numbers]]:
        """Reads the numbers that were not returned yet, and may wait for them on any thread."""
        return self._echo.unseen()

    def evaluated(self, train_state: TrainState, loss: float) -> None:
        """Take note of a held-out loss."""
        self._losses["held-out loss"] = loss
        if self._rank == 0:
            self._write(train_state.step, eval_loss=_finite(loss))
            self._display.say(f"step {train_state.step}: held-out loss {loss:.4f}")

    def say(self, sentence: str) -> None:
        """Show a sentence to the user."""
        self._display.say(sentence)

    def end(self, sentence: str, completed: bool) -> None:
        """Show the user how the run ends, and if it has completed the last losses."""
        told = ", ".join(f"{name} {loss:.4f}" for name, loss in self._losses.items())
        self.say(f"{sentence}: {told}" if told and completed else sentence)

    def close(self) -> None:
        """Restore the terminal."""
        self._display.close()

    def _log(self, made: Numbers) -> None:
        train_state, now = made.train_state, time.monotonic()
        before, tokens = self._logged
        speed = (train_state.tokens - tokens) / max(now - before, 1e-9)
        self._logged = now, train_state.tokens
        mfu = speed * self._flops_per_token / self._peak if self._peak else None
        held_up, self._held_up = self._held_up, StepDelays()
        self._write(
            train_state.step,
            loss=_finite(made.loss),
            grad_norm=_finite(made.norm),
            lr=made.rate,
            tokens=train_state.tokens,
            tokens_per_second=round(speed, 1),
            mfu=round(mfu, 4) if mfu is not None else None,
            save_seconds=round(held_up.saves, 4),
            data_seconds=round(held_up.data, 4),
            wait_seconds=round(held_up.ranks, 4),
        )
        self._display.step(train_state.step, made.loss, speed)

    def _write(self, step: int, **fields: object) -> None:
        entry = {"step": step, "attempt": self._attempt, **fields, "time": round(time.time(), 3)}
        self._metrics.append(entry)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def peak_flops(device: torch.device, world: int) -> float | None:
    """What the world's devices could do per second, if the device is a known one."""
    if device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(device))
    return None if peak is None else world * peak
