"""Where metrics can go: TensorBoard, Weights & Biases, a file for Prometheus.

Each is imported when it is opened, so that only what is used has to be installed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kempner.insight.metrics.lines import MOST_AT_ONCE, Point, Position
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory


class Exporter(Protocol):
    """Takes the points of a run in their order.

    `write` returns when they are kept: an exporter that is opened again goes on after the last
    `write` that returned. Each method may raise whatever the library behind it raises. `at_once`
    are the bytes of metrics.jsonl that one `write` gets at most.
    """

    at_once: int

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An event file in `folder`. Steps that an attempt takes back disappear from the curves.

    TensorBoard drops what it has read of a step and later ones when it meets a session that starts
    with that step, as after the `purge_step` of its writers.
    """

    at_once = MOST_AT_ONCE

    def __init__(self, folder: Path, since: Position) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
                EventFileWriter,
            )
        except ImportError:
            raise missing("tensorboard") from None
        self._file = EventFileWriter(str(folder))
        if since.step:  # what was written after the last `write` that returned comes again
            self._purge(since.step + 1, time.time())

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        for point in points:
            if point.cut:
                self._purge(point.step, point.time)
            values = [
                Summary.Value(tag=name, simple_value=number)
                for name, number in point.values.items()
            ]
            summary = Summary(value=values)
            self._file.add_event(Event(wall_time=point.time, step=point.step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _purge(self, step: int, when: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._file.add_event(Event(wall_time=when, step=step, session_log=start))


class WandB:
    """One run of Weights & Biases, however often the training restarts.

    Its steps only grow: a step that an attempt makes again is not logged a second time. Without
    WANDB_MODE it is offline; `wandb sync` sends it from where there is a network.
    """

    at_once = MOST_AT_ONCE

    def __init__(self, run: RunDirectory, project: str, since: Position) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb
        except ImportError:
            raise missing("wandb") from None
        folder = run.exports / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._highest = since.step
        while list(folder.glob(f"wandb/*{time.strftime('%Y%m%d_%H%M%S')}*")):
            time.sleep(0.1)  # a session of the same second would have the same folder
        self._run: Any = wandb.init(
            project=project,
            name=run.path.resolve().name,
            id=_kept_id(folder / "id"),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            evaluation = "eval/loss" in point.values
            if point.step > self._highest or (evaluation and point.step == self._highest):
                self._highest = point.step
                self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """A text file with the last numbers, for a node exporter's textfile collector."""

    at_once = MOST_AT_ONCE

    def __init__(self, file: Path, run: RunDirectory) -> None:
        self._file, self._run = file, run
        self._last: dict[str, float] = {}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._last.update(point.values)
            if "eval/loss" not in point.values:
                self._last |= {"step": point.step, "attempt": point.attempt, "time": point.time}
        text = prometheus_text(
            self._run.path.resolve().name, self._last, self._run.gave_up.exists()
        )
        replace_durable(self._file, text.encode(), unique="kempner")

    def close(self) -> None:
        """The last numbers stay, and the time in them tells their age."""


_GAUGES = {
    "step": ("step", "last step"),
    "train/loss": ("loss", "training loss of the last logged step, in nats per token"),
    "eval/loss": ("eval_loss", "loss on held-out data, in nats per token"),
    "train/grad_norm": ("grad_norm", "norm of the gradient"),
    "train/lr": ("learning_rate", "learning rate"),
    "train/tokens": ("tokens", "tokens that the run has seen"),
    "train/tokens_per_second": ("tokens_per_second", "tokens a second, over all ranks"),
    "train/mfu": ("mfu", "share of the GPUs' peak that the model uses"),
    "attempt": ("attempt", "number of the attempt"),
    "time": ("last_step_time_seconds", "when the last logged step ended, since the epoch"),
}


def prometheus_text(run: str, values: dict[str, float], given_up: bool) -> str:
    """The exposition format of Prometheus, version 0.0.4; `given_up` is 1 when a person is needed.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    known = [(*_GAUGES[name], values[name]) for name in _GAUGES if name in values]
    known.append(("given_up", "1 if kempner gave up: a person has to look", float(given_up)))
    return "".join(
        f"# HELP kempner_{name} {words}\n# TYPE kempner_{name} gauge\n"
        f'kempner_{name}{{run="{label}"}} {number!r}\n'
        for name, words, number in known
    )


def _kept_id(path: Path) -> str:
    """The run's id, made once: later exporters read it."""
    try:
        with path.open("x") as file:
            file.write(secrets.token_hex(4))
    except FileExistsError:
        pass
    return path.read_text().strip() or secrets.token_hex(4)


def missing(package: str) -> UsageError:
    return UsageError(f"{package} is not installed; pip install 'kempner[{package}]'")
