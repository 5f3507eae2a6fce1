"""`kempner metrics`: export a run's metrics to other tools."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.usage import usable_path
from kempner.insight.metrics.exporters import OpenTelemetry, Prometheus, TensorBoard, WandB
from kempner.insight.metrics.follow import Opener, follow
from kempner.run.control.launch_env import EXPORT_FOR
from kempner.run.process.exit_codes import CannotWriteError, UsageError
from kempner.run.process.signals import follow_parent, inbox
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)


TensorboardOption = Annotated[
    bool, typer.Option("--tensorboard", help="To an event file in RUN_DIR/tensorboard/.")
]
WandbOption = Annotated[
    str | None, typer.Option(metavar="PROJECT", help="To Weights & Biases, one run for all.")
]
PrometheusOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="To a text file with the last numbers.")
]
OpentelemetryOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="To a collector, by OTLP over HTTP; `env`: as OTEL_* variables say."
    ),
]
FollowingOption = Annotated[
    bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C or SIGTERM.")
]


@app.command()
def metrics(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    tensorboard: TensorboardOption = False,
    wandb: WandbOption = None,
    prometheus: PrometheusOption = None,
    opentelemetry: OpentelemetryOption = None,
    following: FollowingOption = False,
) -> None:
    """Export a run's metrics to TensorBoard, Weights & Biases, Prometheus or OpenTelemetry.

    Reads metrics.jsonl only, and continues where it stopped. Works during a run, too.
    """
    run = RunDirectory(usable_path(run_dir))
    openers: dict[str, Opener] = {}
    if tensorboard:
        openers["tensorboard"] = lambda since: TensorBoard(run.path / "tensorboard", since)
    if wandb is not None:
        openers["wandb"] = lambda since: WandB(run, wandb, since)
    if prometheus is not None:
        openers["prometheus"] = lambda _: Prometheus(usable_path(prometheus), run)
    if opentelemetry is not None:
        openers["opentelemetry"] = lambda _: OpenTelemetry(opentelemetry, run)
    if len(openers) != 1:
        raise UsageError(
            "name one of --tensorboard, --wandb PROJECT, --prometheus FILE and --opentelemetry URL"
        )
    if not run.path.is_dir():
        raise UsageError(f"{run.path} is not a run's directory")
    ((kind, open_exporter),) = openers.items()
    stop_event = threading.Event()
    if following:
        _set_on_stop(stop_event)
    else:
        stop_event.set()
    if not follow(run, kind, open_exporter, stop_event.wait) and not following:
        raise CannotWriteError(
            f"not all metrics of {run.path} were exported; the same command goes on from there"
        )


def _set_on_stop(stop_event: threading.Event) -> None:
    """Set the event on a stop signal, or when the supervisor that started this is gone."""
    inbox().install()
    inbox().react_with(lambda _: stop_event.set())
    if supervisor := os.environ.get(EXPORT_FOR):
        follow_parent(int(supervisor), signal.SIGTERM)
