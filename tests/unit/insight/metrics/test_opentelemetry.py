"""Metrics for OpenTelemetry, as a collector gets them: a server on loopback that decodes OTLP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import wait_until
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from test_metrics_export import FIRST, SECOND, trained, write
from typer.testing import CliRunner

from kempner.cli.app import app
from kempner.config.sections import MetricsSection
from kempner.insight.metrics.exporters import OpenTelemetry, endpoint_of
from kempner.insight.metrics.follow import follow
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import hooks
from kempner.supervisor.hooks import MetricsExports


@dataclass
class Collector:
    """What has arrived: `taken` requests, which were answered with 200, and their headers.

    It listens from `start` on, and answers the first requests with the codes of `refusals`.
    """

    refusals: list[int] = field(default_factory=list)
    taken: list[ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        collector = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                right = self.path == "/v1/metrics"
                code = collector.refusals.pop() if collector.refusals else 200 if right else 404
                if code == 200:
                    collector.taken.append(ExportMetricsServiceRequest.FromString(body))
                    collector.headers.append(dict(self.headers))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Answer)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def points(self, metric: str) -> list[tuple[float, int | str, float]]:
        """Time in seconds, attempt and value of each, in the order in which they came."""
        points = (
            point
            for request in self.taken
            for found in request.resource_metrics[0].scope_metrics[0].metrics
            if found.name == metric
            for point in found.gauge.data_points
        )
        return [
            (
                point.time_unix_nano / 1e9,
                attributes(point.attributes)["attempt"],
                getattr(point, point.WhichOneof("value")),
            )
            for point in points
        ]


def attributes(given: list[KeyValue]) -> dict[str, int | str]:
    kinds = ((one, one.value.WhichOneof("value")) for one in given)
    return {one.key: getattr(one.value, kind) for one, kind in kinds}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    made = Collector()
    yield made
    if made.server is not None:
        made.server.shutdown()
        made.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "mine").mkdir()
    return RunDirectory(tmp_path / "mine")


BEFORE = [(1000.0 + step, 1, 5.0) for step in range(1, 8)]
AFTER = [(1000.0 + step, 2, 3.0) for step in range(4, 11)]


def test_a_collector_that_is_down_at_first_gets_each_point_once(
    run: RunDirectory, collector: Collector
) -> None:
    write(run, *FIRST)
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:  # nothing listened until now, and what comes first is refused
            collector.refusals = [400]
            collector.start()
        if len(waits) == 4:
            write(run, *SECOND)
        return len(waits) == 5

    assert follow(run, "opentelemetry", lambda _: OpenTelemetry(collector.url, run), wait)
    assert waits == [0, 4.0, 8.0, 2.0, 2.0]
    assert collector.points("kempner.loss") == [*BEFORE, *AFTER]
    assert collector.points("kempner.eval.loss") == [(1005.5, 1, 4.0), (1005.5, 1, 5.0)]
    assert [value for _, _, value in collector.points("kempner.step")] == [
        *range(1, 8),
        *range(4, 11),
    ]
    assert len(collector.taken) == 2


def test_a_long_run_is_sent_in_requests_of_a_megabyte_or_so(
    run: RunDirectory, collector: Collector
) -> None:
    steps = 3000
    write(run, *(trained(step, 1, 5.0) for step in range(1, steps + 1)))
    collector.start()
    assert follow(run, "opentelemetry", lambda _: OpenTelemetry(collector.url, run), lambda _: True)
    assert [value for _, _, value in collector.points("kempner.step")] == [*range(1, steps + 1)]
    assert len(collector.taken) > 1
    assert max(request.ByteSize() for request in collector.taken) < 2**20


def test_points_say_what_they_are_of(
    run: RunDirectory, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=mine")
    collector.start()
    write(run, json.dumps(json.loads(FIRST[0]) | {"mfu": 0.5, "wait_seconds": 2}))
    command = ["metrics", str(run.path), "--opentelemetry", collector.url]
    for _ in range(2):  # the second time nothing is new
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    (request,), (headers,) = collector.taken, collector.headers
    assert headers["api-key"] == "mine"
    told = attributes(request.resource_metrics[0].resource.attributes)
    assert told["service.name"] == "kempner"
    assert told["service.instance.id"] == "mine"
    assert told["deployment.environment"] == "ours"
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    assert {metric.name: metric.unit for metric in metrics} == {
        **{"kempner.loss": "", "kempner.grad_norm": "", "kempner.learning_rate": ""},
        **{"kempner.tokens": "{token}", "kempner.mfu": "1", "kempner.wait.ranks": "s"},
        "kempner.step": "{step}",
    }
    for metric in metrics:
        (point,) = metric.gauge.data_points
        assert attributes(point.attributes) == {"run": "mine", "attempt": 1}


def test_the_supervisor_exports_to_where_the_environment_says(
    run: RunDirectory, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-training")
    collector.start()
    write(run, *FIRST)
    exports = MetricsExports()
    exports.start(run, MetricsSection(opentelemetry="env"))
    wait_until((run.exports / "opentelemetry.json").exists, "it exports", 60)
    exports.close(complete=True)
    assert collector.points("kempner.loss") == BEFORE
    resource = collector.taken[0].resource_metrics[0].resource
    assert attributes(resource.attributes)["service.name"] == "our-training"


def test_what_cannot_be_sent_is_told_in_a_sentence(
    run: RunDirectory, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endpoint_of("https://a:1/") == endpoint_of("https://a:1/v1/metrics")
    write(run, *FIRST)
    result = CliRunner().invoke(app, ["metrics", str(run.path), "--opentelemetry", collector.url])
    assert getattr(result.exception, "code", None) == ExitCode.CHECKPOINT_FAILED
    assert "the same command goes on from there" in str(result.exception)
    with pytest.raises(UsageError, match=r"collector:4318, .* must be a URL that begins with http"):
        endpoint_of("collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="asks for grpc, and kempner sends http/protobuf only"):
        endpoint_of("env")


def test_without_the_package_the_run_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(hooks, "find_spec", find_spec)
    exports = MetricsExports()
    exports.start(run, MetricsSection(opentelemetry="http://collector:4318"))
    exports.close()
    assert "pip install 'kempner[opentelemetry]'" in "".join(capfd.readouterr())
    assert not run.exports.exists()
