"""Writes down what a rank of a rehearsal sees in each step, and disturbs it as planned.

A step is two lines of JSON: what was there when
it began, and what came of it; what is computed between two steps is a line of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kempner.run.control.rehearsal import Part
from kempner.training.rehearsal.digest import of_state
from kempner.training.rehearsal.outside import Outside
from kempner.training.rehearsal.torch_hooks import Computed, TorchHooks
from kempner.training.rehearsal.variables import Walk, look

STOPPED_WITHIN = 10.0
"""Seconds after which a SIGTERM must have become a request to stop."""


class Recorder:
    """What one rank sees."""

    def __init__(self, part: Part) -> None:
        self._part, self._step = part, 0
        rank = int(os.environ.get("RANK", "0"))
        self._disturbs = rank == 0
        self._file = open(Path(part.folder) / f"rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._names: dict[int, str] = {}
        self._outside = Outside(Path(part.run).parent)
        self._outside.watch()
        self._watch_saves()
        self._hooks = TorchHooks(self._name_of)
        self._hooks.install()
        self._hooks.on_optimizer = self._kill

    def begin_step(self, step: int, asked_to_stop: Callable[[], bool]) -> None:
        """A step begins; called by the loop on the program's behalf."""
        self._write_between()
        seen = look(sys._getframe(1))
        self._names = seen.names
        for optimizer in self._hooks.optimizers.values():
            self._names.setdefault(id(optimizer), type(optimizer).__name__)
        self._step, self._hooks.now = step, Computed()
        self._write({"began": step, **_facts_of(seen), "globals": _global_generators()})
        if self._disturbs and not self._part.kills and step == self._part.at:
            self._stop(asked_to_stop)

    def end_step(self, step: int) -> None:
        """A step is done."""
        now, self._hooks.now = self._hooks.now, Computed()
        self._write({"ended": step, **asdict(now), "weights": self._hooks.weights()})
        self._kill()

    def saved(self, step: int) -> None:
        """The loop saves on its own account."""
        self._write({"saved": step})

    def left(self) -> None:
        """The loop is over."""
        self._write_between()

    def _write_between(self) -> None:
        """What was computed since the last step ended."""
        if self._hooks.now.evaluation:
            self._write({"after": self._step, "evaluation": self._hooks.now.evaluation})
            self._hooks.now = Computed()
        outside = self._outside
        told = {"wrote": outside.written, "read": outside.read, "called": outside.called}
        self._write({name: list(names) for name, names in told.items()})

    def _stop(self, asked_to_stop: Callable[[], bool]) -> None:
        """Have the stop be known before this step's vote."""
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + STOPPED_WITHIN
        while not asked_to_stop() and time.monotonic() < until:
            time.sleep(0.001)

    def _kill(self) -> None:
        if self._disturbs and self._part.kills and self._step >= self._part.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _watch_saves(self) -> None:
        """torch.save opens its file without Python, which tells of no such file."""
        save = torch.save

        def noting(value: Any, f: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(f, str | os.PathLike):
                self._outside.opened(os.fspath(f), for_writing=True)
            save(value, f, *arguments, **options)

        torch.save = noting  # type: ignore[assignment]

    def _name_of(self, thing: object) -> str:
        return self._names.get(id(thing), type(thing).__name__)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _facts_of(seen: Walk) -> dict[str, Any]:
    return {
        "variables": seen.found,
        "iterators": seen.iterators,
        "files": sorted(seen.files),
    }


def _global_generators() -> dict[str, str]:
    """Where the generators stand that belong to no object of the program."""
    return {
        "numpy": of_state(np.random.get_state()),
        "random": of_state(random.getstate()),
    }
