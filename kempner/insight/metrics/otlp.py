"""Metrics for a collector of OpenTelemetry, by OTLP over HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kempner.config.errors import COLLECTOR, PATTERNS
from kempner.insight.metrics.exporters import missing
from kempner.insight.metrics.lines import Point
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric
    from opentelemetry.sdk.resources import Resource

FROM_ENVIRONMENT = "env"
"""In the place of a URL: the standard variables, OTEL_EXPORTER_OTLP_ENDPOINT for one, say it."""

_PATH = "/v1/metrics"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_GAUGES = {
    "train/loss": ("kempner.loss", "", "training loss, per token"),
    "eval/loss": ("kempner.eval.loss", "", "loss on held-out data, per token"),
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
    """Gauges with the time of each step.

    A request is taken as a whole or comes again, with the same times: a collector that has taken it
    before overwrites the same points.
    """

    at_once = 256 * 1024
    """About a megabyte of a request; collectors refuse large ones."""

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
    """Where metrics go, for the base URL of a collector; None where the environment says it."""
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
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = Resource.create({"service.name": "kempner", "service.instance.id": run})
    return ours.merge(OTELResourceDetector().detect())


def _metrics(run: str, points: Sequence[Point]) -> list[Metric]:
    from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint

    found: dict[str, list[NumberDataPoint]] = {}
    for point in points:
        evaluation = "eval/loss" in point.values
        values = point.values if evaluation else {**point.values, "step": point.step}
        told: Mapping[str, str | int] = {"run": run, "attempt": point.attempt}
        for name in values.keys() & _GAUGES.keys():
            one = NumberDataPoint(told, 0, round(point.time * 1e9), values[name])
            found.setdefault(name, []).append(one)
    return [
        Metric(name, about, unit, Gauge(found[key]))
        for key, (name, unit, about) in _GAUGES.items()
        if key in found
    ]
