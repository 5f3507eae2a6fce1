"""The values of `metrics.jsonl` as arrays, read line by line: a million lines take 60 MB."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

Numbers = NDArray[np.float64]

_STEP_FIELDS = (
    "time",
    "step",
    "attempt",
    "loss",
    "grad_norm",
    "tokens_per_second",
    "save_seconds",
    "mfu",
)


_NUMBERS = frozenset((int, float))
"""For an exact type test, which is faster than `isinstance` and excludes bool."""


@dataclass(frozen=True)
class StepSeries:
    """One entry per logged step, in the order of the file; NaN where a line has no value. `time` is
    in seconds since the epoch, `save_seconds` counts from the entry before."""

    time: Numbers
    step: Numbers
    attempt: Numbers
    loss: Numbers
    grad_norm: Numbers
    tokens_per_second: Numbers
    save_seconds: Numbers
    mfu: Numbers

    def of_attempt(self, number: int) -> Self:
        """The entries of one attempt, by time."""
        chosen = np.flatnonzero(self.attempt == number)
        return self._take(chosen[np.argsort(self.time[chosen], kind="stable")])

    def last_times(self) -> dict[int, float]:
        """The time of each attempt's last logged step."""
        numbers = np.unique(self.attempt[~np.isnan(self.attempt)])
        return {int(n): float(self.time[self.attempt == n].max()) for n in numbers}

    def last_of_each_step(self) -> Self:
        """One entry for each step, sorted; for a repeated step the last one counts."""
        backwards = self.step[::-1]
        _, first = np.unique(backwards, return_index=True)
        return self._take(len(backwards) - 1 - first)

    def _take(self, chosen: NDArray[np.intp]) -> Self:
        return type(self)(*(getattr(self, name)[chosen] for name in _STEP_FIELDS))


@dataclass(frozen=True)
class EvalSeries:
    """Held-out losses in nats per token, by step; the last one of each step counts."""

    step: Numbers
    loss: Numbers


Evaluations = Mapping[str, EvalSeries]
"""By the name of the held-out set, which is empty for `eval.dataset_path`; that one always
exists."""


def read_series(path: Path) -> tuple[StepSeries, Evaluations]:
    """The series of a metrics file; empty if it is missing. Skips lines that are torn or not
    kempner's. Raises `OSError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return collect(file)
    except FileNotFoundError:
        return collect(())


def collect(lines: Iterable[bytes]) -> tuple[StepSeries, Evaluations]:
    """As `read_series`, from lines of JSON."""
    rows = array("d")
    evaluated: dict[str, dict[float, float]] = {"": {}}
    for line in lines:
        try:
            entry = from_json(line, allow_inf_nan=False)
            if not isinstance(entry, dict) or type(entry.get("step")) not in _NUMBERS:
                continue
            if "loss" in entry and type(entry.get("time")) in _NUMBERS:
                values: Iterable[Any] = map(entry.get, _STEP_FIELDS)
                found = [value if type(value) in _NUMBERS else nan for value in values]
                rows.extend(array("d", found))  # no partial row if one is too large
            else:
                for name, loss in _losses(entry).items():
                    evaluated.setdefault(name, {})[float(entry["step"])] = loss
        except (ValueError, OverflowError):
            continue
    table = np.frombuffer(rows, np.float64).reshape(-1, len(_STEP_FIELDS))
    sound = np.isfinite(table[:, :2]).all(axis=1)  # time and step
    table = table if sound.all() else table[sound]
    return StepSeries(*table.T), {name: _by_step(found) for name, found in evaluated.items()}


def _losses(entry: Mapping[str, Any]) -> dict[str, float]:
    """The loss of each held-out set in a line about an evaluation."""
    sets = entry.get("eval_sets")
    found: dict[str, Any] = {"": entry.get("eval_loss")}
    for name, numbers in sets.items() if isinstance(sets, dict) else ():
        found[name] = numbers.get("loss") if isinstance(numbers, dict) else None
    return {name: float(loss) for name, loss in found.items() if type(loss) in _NUMBERS}


def _by_step(losses: Mapping[float, float]) -> EvalSeries:
    pairs = sorted(losses.items())
    return EvalSeries(*(np.array([pair[side] for pair in pairs], np.float64) for side in (0, 1)))
