"""Exporters of metrics: TensorBoard, Weights & Biases, a file for Prometheus, OpenTelemetry.

Each imports its library when it is opened, so that only those in use must be installed.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.config.errors import COLLECTOR, PATTERNS
from kempner.insight.metrics.follow import MOST_AT_ONCE, Point, Position
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric
    from opentelemetry.sdk.resources import Resource


class TensorBoard:
    """An event file in `folder`. Steps that a later attempt repeats disappear from the curves.

    TensorBoard drops a step and later ones when it reads a session that starts with that step, as
    with `purge_step` of its writers.
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
        if since.step:  # points after the last completed `write` come again
            self._purge(since.step + 1, time.time())

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        for point in points:
            if point.cut:
                self._purge(point.step, point.time)
            numbers = point.values.items()
            summary = Summary(value=[Summary.Value(tag=n, simple_value=x) for n, x in numbers])
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

    Its steps only increase: a step that is repeated is not logged again. Without WANDB_MODE it is
    offline; `wandb sync` uploads it from a machine with a network.
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
            time.sleep(0.1)  # a session that began in the same second would share the folder
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
            if point.step > self._highest or (point.evaluation and point.step == self._highest):
                self._highest = point.step
                self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """A text file with the last values, for node exporter's textfile collector."""

    at_once = MOST_AT_ONCE

    def __init__(self, file: Path, run: RunDirectory) -> None:
        self._file, self._run = file, run
        self._last: dict[str, float] = {}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._last.update(point.values)
            if not point.evaluation:
                self._last |= {"step": point.step, "attempt": point.attempt, "time": point.time}
        name, given_up = self._run.path.resolve().name, self._run.gave_up.exists()
        text = prometheus_text(name, self._last, given_up)
        replace_durable(self._file, text.encode(), unique="kempner")

    def close(self) -> None:
        """The file stays; its time shows its age."""


_GAUGES = {
    "step": ("step", "last step"),
    "train/loss": ("loss", "training loss of the last logged step, in nats per token"),
    "eval/loss": ("eval_loss", "loss on held-out data, in nats per token"),
    "eval/perplexity": ("eval_perplexity", "perplexity on held-out data"),
    "eval/bits_per_byte": ("eval_bits_per_byte", "loss on held-out data, in bits per byte"),
    "eval/accuracy": ("eval_accuracy", "share of held-out pairs that are preferred rightly"),
    "train/margin": ("margin", "margin of the chosen over the rejected answers"),
    "train/accuracy": ("accuracy", "share of the last step's pairs that are preferred rightly"),
    "train/grad_norm": ("grad_norm", "norm of the gradient"),
    "train/lr": ("learning_rate", "learning rate"),
    "train/tokens": ("tokens", "tokens that the run has seen"),
    "train/tokens_per_second": ("tokens_per_second", "tokens a second, over all ranks"),
    "train/mfu": ("mfu", "share of the GPUs' peak that the model uses"),
    "attempt": ("attempt", "number of the attempt"),
    "time": ("last_step_time_seconds", "when the last logged step ended, since the epoch"),
}


def prometheus_text(run: str, values: dict[str, float], given_up: bool) -> str:
    """Prometheus's exposition format, version 0.0.4; its `given_up` is 1 if a person must act.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    samples_by_name: dict[str, list[str]] = {}
    for key, number in values.items():
        name, of_set = split_set(key)
        more = f',set="{of_set}"' if of_set else ""
        samples_by_name.setdefault(name, []).append(f'{{run="{label}"{more}}} {number!r}')
    known = [(*_GAUGES[name], samples_by_name[name]) for name in _GAUGES if name in samples_by_name]
    last = [f'{{run="{label}"}} {float(given_up)!r}']
    known.append(("given_up", "1 if kempner gave up: a person has to look", last))
    return "".join(
        f"# HELP kempner_{name} {words}\n# TYPE kempner_{name} gauge\n"
        + "".join(f"kempner_{name}{line}\n" for line in lines)
        for name, words, lines in known
    )


def split_set(name: str) -> tuple[str, str]:
    """Split `eval/code/loss` into `eval/loss` and the set `code`; other names have no set."""
    parts = name.split("/")
    return (f"{parts[0]}/{parts[2]}", parts[1]) if len(parts) == 3 else (name, "")


def _kept_id(path: Path) -> str:
    """The run's id, created once and then read from `path`."""
    with suppress(FileExistsError), path.open("x") as file:
        file.write(secrets.token_hex(4))
    return path.read_text().strip() or secrets.token_hex(4)


def missing(package: str) -> UsageError:
    return UsageError(f"{package} is not installed; pip install 'kempner[{package}]'")


FROM_ENVIRONMENT = "env"
"""Instead of a URL: use the standard variables, such as OTEL_EXPORTER_OTLP_ENDPOINT."""

_PATH = "/v1/metrics"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_OTEL_GAUGES = {
    "train/loss": ("kempner.loss", "", "training loss, per token"),
    "eval/loss": ("kempner.eval.loss", "", "loss on held-out data, per token"),
    "eval/perplexity": ("kempner.eval.perplexity", "1", "perplexity on held-out data"),
    "eval/bits_per_byte": ("kempner.eval.bits_per_byte", "bit/By", "loss on held-out data"),
    "eval/accuracy": ("kempner.eval.accuracy", "1", "held-out pairs that are preferred rightly"),
    "train/margin": ("kempner.margin", "", "margin of the chosen over the rejected answers"),
    "train/accuracy": ("kempner.accuracy", "1", "pairs that are preferred rightly"),
    "train/grad_norm": ("kempner.grad_norm", "", "norm of the gradient"),
    "train/lr": ("kempner.learning_rate", "", "learning rate"),
    "train/tokens": ("kempner.tokens", "{token}", "tokens that the run has seen"),
    "train/tokens_per_second": ("kempner.throughput", "{token}/s", "tokens, over all ranks"),
    "train/mfu": ("kempner.mfu", "1", "share of the GPUs' peak that the model uses"),
    "train/data_seconds": ("kempner.wait.data", "s", "rank 0 waited for data since the last step"),
    "train/wait_seconds": ("kempner.wait.ranks", "s", "rank 0 waited for others since then"),
    "train/save_seconds": ("kempner.wait.saves", "s", "rank 0 was held up by saves since then"),
    "step": ("kempner.step", "{step}", "step"),
}


class OpenTelemetry:
    """Gauges with the time of each step. A request that fails is sent again with the same times, so
    that a collector which has stored it overwrites the same points."""

    at_once = 256 * 1024  # makes requests of about 1 MB; collectors refuse large ones

    def __init__(self, url: str, run: RunDirectory) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        except ImportError:
            raise missing("opentelemetry") from None
        endpoint = endpoint_of(url)
        self._run = run.path.resolve().name
        self._resource = _resource(self._run)
        self._exporter = OTLPMetricExporter(endpoint)
        self._place = endpoint or "the place that OTEL_EXPORTER_OTLP_ENDPOINT names"

    def write(self, points: Sequence[Point]) -> None:
        from opentelemetry.sdk.metrics.export import (
            MetricExportResult,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        if not (metrics := _metrics(self._run, points)):
            return
        scope = ScopeMetrics(InstrumentationScope("kempner"), metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise OSError(f"{self._place} does not take them")

    def close(self) -> None:
        self._exporter.shutdown()


def endpoint_of(url: str) -> str | None:
    """The endpoint for a collector's base URL; None if the environment has it."""
    if not re.match(COLLECTOR, url):
        raise UsageError(f"{url}, a collector of OpenTelemetry, {PATTERNS[COLLECTOR]}")
    if url != FROM_ENVIRONMENT:
        return url if url.endswith(_PATH) else url.rstrip("/") + _PATH
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "")
    if protocol not in ("", "http/protobuf"):
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}, and kempner sends http/protobuf "
            "only: name the collector's port for it, http://COLLECTOR:4318, in the place of "
            f"{FROM_ENVIRONMENT}"
        )
    return None


def _resource(run: str) -> Resource:
    """The resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = Resource.create({"service.name": "kempner", "service.instance.id": run})
    return ours.merge(OTELResourceDetector().detect())


def _metrics(run: str, points: Sequence[Point]) -> list[Metric]:
    from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint

    found: dict[str, list[NumberDataPoint]] = {}
    for point in points:
        values = point.values if point.evaluation else {**point.values, "step": point.step}
        for key, number in values.items():
            name, of_set = split_set(key)
            attributes: Mapping[str, str | int] = {"run": run, "attempt": point.attempt}
            attributes = {**attributes, "set": of_set} if of_set else attributes
            one = NumberDataPoint(attributes, 0, round(point.time * 1e9), number)
            found.setdefault(name, []).append(one)
    return [
        Metric(name, about, unit, Gauge(found[key]))
        for key, (name, unit, about) in _OTEL_GAUGES.items()
        if key in found
    ]
