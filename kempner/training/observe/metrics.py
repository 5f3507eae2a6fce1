"""Records metrics and samples of each step, and shows progress.

Copies loss and gradient norm to the host without making it wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kempner.checkpoint.format.manifest import TrainState
from kempner.config.sections import Config
from kempner.model.spec.step_time import peak_flops_of
from kempner.run.control.heartbeat import StepDelays
from kempner.run.output.logs import warn
from kempner.run.output.writers import open_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.training.anomalies import Numbers
from kempner.training.compute.fingerprint import text_of
from kempner.training.compute.preferences import PAIR_MEANS
from kempner.training.observe.progress_bar import Display


@dataclass(frozen=True)
class Scores:
    """Scores of a held-out set: mean loss in nats per token, and in bits per byte of its text, None
    if the number of bytes is unknown. Of preferences the mean loss per pair, and `accuracy`, the
    share of pairs whose chosen answer is preferred."""

    loss: float
    bits_per_byte: float | None = None
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def known(self) -> dict[str, float | None]:
        """The scores by their names in metrics.jsonl; None for NaN and infinity."""
        if self.accuracy is not None:
            return {"loss": finite_or_none(self.loss), "accuracy": finite_or_none(self.accuracy)}
        bits = (
            {}
            if self.bits_per_byte is None
            else {"bits_per_byte": finite_or_none(self.bits_per_byte)}
        )
        return {
            "loss": finite_or_none(self.loss),
            "perplexity": finite_or_none(self.perplexity),
            **bits,
        }


@dataclass(frozen=True)
class _Pending:
    """`numbers` has the bits of a fingerprint first, if there is one, as two of its elements."""

    train_state: TrainState
    rate: float
    numbers: Tensor
    printed: bool
    arrived: torch.cuda.Event | None

    def read(self) -> Numbers:
        if self.arrived is not None:
            self.arrived.synchronize()
        first = 2 if self.printed else 0
        printed = int(self.numbers[:2].view(torch.int64)) if self.printed else None
        loss, *of_pairs, norm = self.numbers[first:].tolist()
        named = dict(zip(PAIR_MEANS, of_pairs, strict=False))
        return Numbers(self.train_state, loss, norm, self.rate, named, printed)


class AsyncMetrics:
    """Copies loss, gradient norm and fingerprint of each step to the host, and returns them in
    order. On a GPU a step's values are returned one step later: while the host waits for them, the
    GPU already has the next step to work on."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def send(
        self,
        train_state: TrainState,
        means: Tensor,
        norm: Tensor,
        rate: float,
        printed: Tensor | None = None,
    ) -> None:
        """Start the copy for the step that leads to `train_state`; `means` are those of
        `StepGradient.add`, and `printed` is the fingerprint of the state after it."""
        numbers, arrived = torch.cat([means.float(), norm.float()[None]]), None
        if printed is not None:
            bits = printed.view(1).view(torch.int32)
            numbers = torch.cat([bits, numbers.view(torch.int32)]).view(torch.float32)
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(
                numbers, non_blocking=True
            )
            arrived = torch.cuda.current_stream().record_event()
        self._pending.append(_Pending(train_state, rate, numbers, printed is not None, arrived))

    def arrivals(self, everything: bool) -> Iterator[Numbers]:
        """Yield the values of finished steps, each once; with `everything`, wait for the newest
        step, too. All ranks yield the same steps and bit-identical losses, since an all-reduce
        gives every rank the same sum."""
        while self._pending:
            oldest = self._pending[0]
            if oldest.arrived is not None and len(self._pending) == 1 and not everything:
                return
            self._pending.popleft()
            yield oldest.read()

    def unseen(self) -> Callable[[], list[Numbers]]:
        """A function that reads the values not returned yet; it may wait, on any thread."""
        pending = list(self._pending)
        return lambda: [one.read() for one in pending]

    def forget(self) -> None:
        self._pending.clear()


class StepMetrics:
    """Writes metrics.jsonl and shows progress on rank 0; with `log_samples`, also writes the
    positions of the samples of every rank."""

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
        take_held_up: Callable[[], StepDelays],
    ) -> None:
        self._config, self._attempt, self._rank = config, attempt, rank
        self._metrics = open_lines(run.metrics, warn)
        self._samples = open_lines(run.samples(rank), warn) if log_samples else None
        self.log_samples = log_samples
        self.recent = AsyncMetrics()
        """Loss and gradient norm of the last steps."""
        self._peak, self._flops_per_token = flops_per_second_at_peak, flops_per_token
        self._display = display
        self._logged = time.monotonic(), 0
        self._take_held_up = take_held_up
        self._losses: dict[str, float] = {}

    def start(self, train_state: TrainState) -> None:
        """Count time and tokens from here on."""
        self.recent.forget()
        self._logged = time.monotonic(), train_state.tokens

    def record_samples(self, train_state: TrainState, positions: Sequence[int]) -> None:
        if self._samples is not None:
            place = {"step": train_state.step, "attempt": self._attempt, "rank": self._rank}
            self._samples.append({**place, "samples": list(positions)})

    def tell(self, made: Numbers) -> None:
        self._losses["loss"] = made.loss
        if self._rank != 0 or made.train_state.step % self._config.metrics.log_interval != 0:
            return
        train_state, now = made.train_state, time.monotonic()
        before, tokens = self._logged
        speed = (train_state.tokens - tokens) / max(now - before, 1e-9)
        self._logged = now, train_state.tokens
        mfu = speed * self._flops_per_token / self._peak if self._peak else None
        held_up = self._take_held_up()
        self._metrics.append(
            {
                "step": train_state.step,
                "attempt": self._attempt,
                "loss": finite_or_none(made.loss),
                **{name: finite_or_none(value) for name, value in made.of_pairs.items()},
                "grad_norm": finite_or_none(made.norm),
                "lr": made.rate,
                **({} if made.fingerprint is None else {"fingerprint": text_of(made.fingerprint)}),
                "tokens": train_state.tokens,
                "tokens_per_second": round(speed, 1),
                "mfu": round(mfu, 4) if mfu is not None else None,
                "save_seconds": round(held_up.saves, 4),
                "data_seconds": round(held_up.data, 4),
                "wait_seconds": round(held_up.ranks, 4),
                "time": round(time.time(), 3),
            }
        )
        self._display.step(train_state.step, made.loss, speed)

    def evaluated(self, train_state: TrainState, scores: Mapping[str, Scores]) -> None:
        """Log the scores of the held-out sets; the unnamed set is that of eval.dataset_path."""
        losses = {f"{name or 'held-out'} loss": one.loss for name, one in scores.items()}
        self._losses |= losses
        if self._rank == 0:
            line: dict[str, object] = {"step": train_state.step, "attempt": self._attempt}
            sets = {name: one.known() for name, one in scores.items()}
            line |= {f"eval_{key}": value for key, value in sets.pop("", {}).items()}
            line |= {"eval_sets": sets} if sets else {}
            self._metrics.append({**line, "time": round(time.time(), 3)})
            loss_text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            self._display.say(f"step {train_state.step}: {loss_text}")

    def say(self, sentence: str) -> None:
        self._display.say(sentence)

    def end(self, sentence: str, completed: bool) -> None:
        loss_text = ", ".join(f"{name} {loss:.4f}" for name, loss in self._losses.items())
        self.say(f"{sentence}: {loss_text}" if loss_text and completed else sentence)

    def close(self) -> None:
        """Restore the terminal."""
        self._display.close()


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN or infinity


def peak_flops(device: torch.device, world: int) -> float | None:
    """Peak FLOP/s of the world's devices; None if the device is unknown."""
    if device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(device))
    return None if peak is None else world * peak
