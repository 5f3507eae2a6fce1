"""Metrics where people look at them: read back by the programs that they are for."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from patience import scaled
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner
from wandb.proto import wandb_internal_pb2

from kempner.cli.app import app
from kempner.config.sections import MetricsSection
from kempner.insight.metrics import follow as lines
from kempner.insight.metrics.exporters import prometheus_text
from kempner.insight.metrics.follow import Point, Position, follow, read_new
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import hooks
from kempner.supervisor.hooks import MetricsExports


def trained(step: int, attempt: int, loss: float) -> str:
    fields = {"loss": loss, "grad_norm": 1.5, "lr": 0.1, "tokens": step * 8, "mfu": None}
    return json.dumps({"step": step, "attempt": attempt, **fields, "time": 1000.0 + step})


def evaluated(step: int, loss: float) -> str:
    sets = {"code": {"loss": loss + 1, "bits_per_byte": 0.5}}
    known = {"eval_loss": loss, "eval_sets": sets, "time": 1000.5 + step}
    return json.dumps({"step": step, "attempt": 1, **known})


def write(run: RunDirectory, *new: str, mode: str = "a") -> None:
    with run.metrics.open(mode) as file:
        file.writelines(f"{line}\n" for line in new)


FIRST = [*(trained(step, 1, 5.0) for step in range(1, 8)), evaluated(5, 4.0)]
SECOND = [trained(step, 2, 3.0) for step in range(4, 11)]
"""The second attempt goes on after step 3."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "mine").mkdir()
    return RunDirectory(tmp_path / "mine")


# Following the file


def test_what_a_later_attempt_takes_back_is_cut(run: RunDirectory) -> None:
    write(run, *FIRST, "no JSON", '{"step": "x"}', '{"step": 9}', "[]", *SECOND)
    points, position = read_new(run.metrics, Position())
    assert [point.step for point in points if "train/loss" in point.values] == [
        *range(1, 8),
        *range(4, 11),
    ]
    assert [point.step for point in points if point.cut] == [4]
    assert points[0].values == {
        "train/loss": 5.0,
        "train/grad_norm": 1.5,
        "train/lr": 0.1,
        "train/tokens": 8.0,
    }
    assert (position.step, position.evaluated) == (10, 3)
    write(run, evaluated(5, 4.0), evaluated(5, 4.0))
    (made_up_for,), position = read_new(run.metrics, position)
    assert (made_up_for.step, position.evaluated) == (5, 5)


def test_half_a_line_waits_for_its_other_half(run: RunDirectory) -> None:
    write(run, FIRST[0])
    with run.metrics.open("a") as file:
        file.write(FIRST[1][:10])
    points, position = read_new(run.metrics, Position())
    assert [point.step for point in points] == [1]
    with run.metrics.open("a") as file:
        file.write(FIRST[1][10:] + "\n")
    points, position = read_new(run.metrics, position)
    assert [point.step for point in points] == [2]
    assert read_new(run.metrics, position) == ([], position)


def test_a_shorter_file_is_another_one_and_none_is_nothing(run: RunDirectory) -> None:
    assert read_new(run.metrics, Position()) == ([], Position())
    write(run, *FIRST)
    _, position = read_new(run.metrics, Position())
    write(run, FIRST[0], mode="w")
    points, position = read_new(run.metrics, position)
    assert [(point.step, point.cut) for point in points] == [(1, False)]


def test_a_long_file_is_read_in_parts(run: RunDirectory) -> None:
    write(run, *FIRST)
    first, position = read_new(run.metrics, Position(), most=500)
    second, position = read_new(run.metrics, position, most=500)
    assert 0 < len(first) < len(FIRST)
    assert position.step == 7
    assert not any(point.cut for point in (*first, *second))


# The programs that they are for


def metrics_command(run: RunDirectory, *options: str) -> None:
    result = CliRunner().invoke(app, ["metrics", str(run.path), *options])
    assert result.exit_code == 0, result.output


def curve(run: RunDirectory, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]


def test_tensorboard_shows_each_step_once_whatever_was_cut_off(run: RunDirectory) -> None:
    write(run, *FIRST)
    metrics_command(run, "--tensorboard")
    assert curve(run, "train/loss") == [(step, 5.0) for step in range(1, 8)]
    assert curve(run, "eval/loss") == [(5, 4.0)]
    assert curve(run, "eval/code/loss") == [(5, 5.0)]
    before = (run.exports / "tensorboard.json").read_text()
    write(run, *SECOND)
    metrics_command(run, "--tensorboard")
    final = [(step, 5.0 if step < 4 else 3.0) for step in range(1, 11)]
    assert curve(run, "train/loss") == final
    # Killed after it wrote, before it kept how far it was:
    (run.exports / "tensorboard.json").write_text(before)
    metrics_command(run, "--tensorboard")
    assert curve(run, "train/loss") == final


def test_weights_and_biases_gets_one_run_whose_steps_grow(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    command = [sys.executable, "-m", "kempner", "metrics", str(run.path), "--wandb", "our-project"]
    for lines_of_an_attempt in (FIRST, SECOND):
        write(run, *lines_of_an_attempt)
        subprocess.run(command, check=True, capture_output=True)
    stores = sorted((run.exports / "wandb").rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({path.name for path in stores}) == 1
    assert len(stores) == 2
    logged = [step for path in stores for step in steps_in(path)]
    assert logged == [*range(1, 8), 8, 9, 10]


def steps_in(path: Path) -> list[int]:
    """The steps of a stored run, as `wandb sync` would send them."""
    steps = []
    for data in stored_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    return steps


def stored_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB, of pieces with checksum, length and kind."""
    at, whole, kind_of_last = 7, b"", 4
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, kind_of_last):
            yield whole
            whole = b""


def test_prometheus_gets_the_last_numbers(run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "kempner.prom"
    write(run, *FIRST)
    metrics_command(run, "--prometheus", str(file))
    told = dict(re.findall(r'^kempner_(\w+)\{run="mine"\} (\S+)$', file.read_text(), re.MULTILINE))
    assert {name: float(value) for name, value in told.items()} == {
        **{"step": 7, "attempt": 1, "last_step_time_seconds": 1007, "given_up": 0},
        **{"loss": 5, "eval_loss": 4, "grad_norm": 1.5, "learning_rate": 0.1, "tokens": 56},
    }
    of_code = {"eval_loss": 5.0, "eval_bits_per_byte": 0.5}
    for name, number in of_code.items():
        assert f'kempner_{name}{{run="mine",set="code"}} {number}\n' in file.read_text()
    assert file.read_text().count("# TYPE kempner_eval_loss gauge") == 1
    assert 'run="a\\"b\\\\c"' in prometheus_text('a"b\\c', {"step": 1.0}, given_up=True)
    assert prometheus_text("x", {}, given_up=True).endswith("1.0\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [],
            "name one of --tensorboard, --wandb PROJECT, --prometheus FILE and --opentelemetry URL",
        ),
        (["--tensorboard", "--wandb", "x"], "name one of"),
    ],
)
def test_one_place_at_a_time(run: RunDirectory, options: Sequence[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["metrics", str(run.path), *options])
    assert sentence in str(result.exception)


# What goes wrong


class Failing:
    """An exporter that cannot write for a while."""

    at_once = lines.MOST_AT_ONCE

    def __init__(self, kept: list[int], failures: list[int]) -> None:
        self._kept, self._failures = kept, failures

    def write(self, points: Sequence[Point]) -> None:
        if self._failures:
            raise OSError(self._failures.pop(), "no")
        self._kept += [point.step for point in points]

    def close(self) -> None: ...


def test_a_full_disk_is_waited_for_and_nothing_is_skipped(run: RunDirectory) -> None:
    write(run, *FIRST[:7])
    kept, failures, waits = list[int](), [errno.ENOSPC, errno.ESTALE, errno.EIO], list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 5

    opened: Callable[[Position], Any] = lambda _: Failing(kept, failures)  # noqa: E731
    follow(run, "failing", opened, wait)
    assert kept == [*range(1, 8)]
    assert waits == [0, 4.0, 8.0, 16.0, 2.0]


def test_an_exporter_that_hangs_is_left_behind_and_goes_on_later(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "LEFT_WITHIN", 0.5)
    section = MetricsSection(tensorboard=True)
    write(run, *FIRST)
    exports = MetricsExports()
    exports.start(run, section)
    (process,) = exports._running.values()
    kept = run.exports / "tensorboard.json"
    wait_until(kept.exists, "it exports", 60)
    os.kill(process.pid, signal.SIGSTOP)
    write(run, *SECOND)
    exports.close()
    assert process.wait(scaled(60)) == -signal.SIGKILL

    exports = MetricsExports()
    exports.start(run, section)
    exports.close(complete=True)  # which is before it has begun
    assert curve(run, "train/loss") == [(step, 5.0 if step < 4 else 3.0) for step in range(1, 11)]
    assert exports._running["tensorboard"].returncode == 0


def test_the_user_of_a_complete_run_is_told_what_is_waited_for_and_what_is_missing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hooks, "SILENT", 0.1)
    monkeypatch.setattr(hooks, "LEFT_AT_LAST", 0.5)
    exports = MetricsExports()
    exports.start(run, MetricsSection(tensorboard=True))
    (process,) = exports._running.values()
    os.kill(process.pid, signal.SIGSTOP)
    exports.close(complete=True)
    assert process.wait(scaled(60)) == -signal.SIGKILL
    told = "".join(capfd.readouterr())
    assert "handing on the last metrics" in told
    assert "`kempner metrics` goes on from there" in told


STOPPED_WITHIN_A_WAIT = """
import os, signal, sys, threading
from kempner.cli import entry
from kempner.cli.insight import metrics

class Event(threading.Event):
    def wait(self, timeout=None):
        if timeout and not self.is_set():
            with self._cond:  # as its own wait has it, when it begins
                os.kill(os.getpid(), signal.SIGTERM)
        return super().wait(timeout)

metrics.threading.Event = Event
entry.main()
"""


def test_an_exporter_that_is_stopped_as_it_begins_to_wait_ends(
    run: RunDirectory, tmp_path: Path
) -> None:
    """A handler that called the event's `set` would wait for the lock that this wait holds."""
    write(run, *FIRST)
    command = [sys.executable, "-c", STOPPED_WITHIN_A_WAIT, "metrics", str(run.path)]
    options = ["--prometheus", str(tmp_path / "file.prom"), "--follow"]
    assert subprocess.run([*command, *options], timeout=scaled(60)).returncode == 0


def test_a_package_that_is_missing_is_told_and_costs_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hooks, "find_spec", lambda _: None)
    exports = MetricsExports()
    exports.start(run, MetricsSection(tensorboard=True))
    exports.close()
    assert "pip install 'kempner[tensorboard]'" in "".join(capfd.readouterr())
    assert not run.exports.exists()
