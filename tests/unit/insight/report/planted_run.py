"""Runs whose every second was planted: a ledger and metrics, and what they have to come to."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from kempner.insight.report.summary import RunReport, read_run
from kempner.run.record.run_dir import RunDirectory

BEGIN = 1_700_000_000.0


class PlantedRun:
    """Time goes on as one asks for it; what it was spent on is kept in `planted`, by category."""

    def __init__(self, path: Path, step_takes: float = 2.0, ranks: int = 4) -> None:
        self.path, self.step_takes, self.ranks = path, step_takes, ranks
        self.now, self.attempt, self.step = BEGIN, 0, 0
        self.planted: defaultdict[str, float] = defaultdict(float)
        self.ledger: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self._pending_save = 0.0
        self._supervisor_began: float | None = None

    def spend(self, category: str, seconds: float) -> None:
        """`seconds` pass, and belong to this category."""
        self.now += seconds
        self.planted[category] += seconds

    def tell(self, event: str, **fields: Any) -> None:
        """A line of the ledger."""
        head = {"schema": 1, "time": round(self.now, 3), "event": event, "attempt": self.attempt}
        self.ledger.append({**head, **fields})

    def begin(
        self,
        start: float = 20.0,
        load: float = 5.0,
        warm_up: float = 3.0,
        supervisor: float | None = None,
    ) -> None:
        """Start an attempt, which goes on from `self.step`, and make its first step.

        A new `supervisor` needs some seconds of its own before that.
        """
        self.attempt += 1
        fields: dict[str, Any] = {"ranks": self.ranks, "nodes": "n[1-2]", "job": "7", "restarts": 0}
        if supervisor is not None:
            fields["process_began"] = self._supervisor_began = round(self.now, 3)
            self.spend("start", supervisor)
        elif self._supervisor_began is not None:
            fields["process_began"] = self._supervisor_began
        self.tell("attempt_started", **fields)
        self.spend("start", start)
        self.spend("load", load)
        reached = {"rendezvous": 9.0, "load": 10.0, "compile": 10.0 + load}
        self.tell("ready_to_train", step=self.step, device="cuda:0", reached=reached)
        self.spend("start", warm_up)

    def train_and_save(self, beyond: int = 0) -> None:
        """Begin, save after 20 steps, and make some `beyond` them."""
        self.begin()
        self.steps(20)
        self.save()
        self.steps(beyond)

    def go_on_from(self, step: int, again: int) -> None:
        """Begin from the checkpoint of a step, and make steps `again`."""
        self.step = step
        self.begin()
        self.steps(again, "recomputed")

    def steps(self, many: int, category: str = "train", log_every: int = 1) -> None:
        """Make steps, which are logged."""
        for _ in range(many):
            self.spend(category, self.step_takes)
            self.step += 1
            if self.step % log_every == 0:
                self._log()

    def _log(self) -> None:
        entry = {"step": self.step, "attempt": self.attempt, "loss": 3.0 - self.step / 1000}
        entry |= {"grad_norm": 1.0, "tokens_per_second": 1000.0, "time": round(self.now, 3)}
        self.metrics.append({**entry, "save_seconds": self._pending_save})
        self._pending_save = 0.0

    def save(self, held_up: float = 0.5) -> None:
        """A checkpoint, which holds training up; it is durable a second later."""
        self.spend("save", held_up)
        self._pending_save += held_up
        took = {"stage_seconds": held_up, "write_seconds": 1.0, "commit_seconds": 0.1}
        self.tell("checkpoint_committed", step=self.step, bytes=10**6, **took)

    def stalled_save(self, steps: int, stalled: float) -> None:
        """The files of a save cannot be written; after `steps` steps the next save waits for it."""
        held_up, began = 0.5, self.now
        self.spend("save", held_up)
        self._pending_save = held_up
        self.steps(steps)
        self.spend("storage", stalled)
        self._pending_save += stalled
        took = {"stage_seconds": held_up, "write_seconds": self.now - began - held_up}
        self.tell(
            "checkpoint_committed", step=self.step - steps, bytes=10**6, commit_seconds=0.0, **took
        )

    def evaluate(self, seconds: float = 4.0) -> None:
        """An evaluation."""
        self.spend("eval", seconds)
        self.tell("evaluated", step=self.step, loss=2.5, seconds=seconds)
        entry = {"step": self.step, "attempt": self.attempt, "eval_loss": 2.5}
        self.metrics.append({**entry, "time": self.now})

    def fail(self, ending: float = 1.5, cut_off: float = 0.7, restart: float | None = 2.0) -> None:
        """A rank dies in the middle of a step; the same supervisor goes on after a pause."""
        self.spend("recomputed", cut_off)
        self.spend("stop", ending)
        reason, exits = "rank 3 was killed by SIGKILL", {"3": -9}
        self.tell("attempt_ended", code=1, reason=reason, culprit=3, exits=exits, seconds=ending)
        self.tell("attempt_failed", step=self.step + 1, committed=0, raised="", node="n2")
        if restart is not None:
            self.tell("restarting", reason="restarting")
            self.spend("start", restart)

    def hang(self, seconds: float, ending: float = 0.3) -> None:
        """Nothing moves until it is noticed."""
        self.spend("hung", seconds)
        fields = {"laggard": 1, "waiting": {}, "processes": [], "seconds": seconds}
        self.tell("hang", reason="no rank has moved", **fields)
        self.spend("stop", ending)
        self.tell(
            "attempt_ended", code=77, reason="no rank has moved", culprit=1, exits={}, seconds=0.1
        )
        self.tell("attempt_failed", step=self.step + 1, committed=0, raised="", node="n1")
        self.tell("restarting", reason="restarting")

    def stop(self, reason: str = "time_limit", seconds: float = 6.0, lost: int = 0) -> None:
        """The ranks are asked to stop, save, but for `lost` steps, and leave."""
        self.tell("stop_requested", reason=reason, sentence="the end is near", seconds_left=90.0)
        self.spend("stop", seconds)
        self.tell("stopped", step=self.step, reason=reason, lost_steps=lost)
        self.tell("attempt_ended", code=75, reason="stopped", culprit=None, exits={}, seconds=0.1)

    def complete(self, seconds: float = 2.0) -> None:
        """The last step is saved, and the run is over."""
        self.spend("stop", seconds)
        self.tell("completed", step=self.step)
        self.tell("attempt_ended", code=0, reason="completed", culprit=None, exits={}, seconds=0.1)

    def write(self) -> RunDirectory:
        """The run's directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, lines in (("ledger", self.ledger), ("metrics", self.metrics)):
            content = "".join(json.dumps(line) + "\n" for line in lines)
            (self.path / f"{name}.jsonl").write_text(content)
        return RunDirectory(self.path)

    def report(self) -> RunReport:
        """What kempner makes of it."""
        return read_run(self.write()).report
