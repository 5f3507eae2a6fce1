"""The `kempner` command: `kempner config`, and how an outcome becomes an exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import typer
from harness import PYTHON, write_tokens
from patience import scaled

import kempner
from kempner.cli.entry import main
from kempner.config.errors import ConfigError
from kempner.config.loading import known_keys, load
from kempner.run.process.exit_codes import DataError, DivergedError, ExitCode, RunError, UsageError

BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def run(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # elsewhere there may be a run of that name
    path = tmp_path / "debug.toml"
    write_tokens(tmp_path / "tokens", [range(257), range(257)])
    path.write_text(
        "[train]\nmax_steps = 1234\nglobal_batch_size = 4\nseq_len = 512\n"
        f'[data]\ndataset_path = "{tmp_path}/tokens"\n'
    )
    return path


def test_show_prints_what_loads_to_the_same(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("config", "show", path, "--run.dir=some where", "--train.seed=5") == 0

    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load(shown) == load(path, ["--run.dir=some where", "--train.seed=5"])


def test_check_sums_the_run_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", path, "--model.vocab_size=257", "--model.n_layers=1") == 0

    # Two tables of 257 x 256, four projections and a SwiGLU of 768, two norms and the last one.
    parameters = 2 * 257 * 256 + 4 * 256 * 256 + 3 * 256 * 768 + 3 * 256
    line = f"ok: {path}: run runs/debug, 1,234 steps of 2,048 tokens, {parameters:,} parameters\n"
    assert capsys.readouterr().out == line


def test_check_estimates_the_memory_of_a_rank(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary is that of the data, unless the configuration says it; then no data is needed
    for the estimate.
    """
    assert run("config", "check", path, "--world=2") == 0
    said = capsys.readouterr().out.splitlines()[:1]
    away = ["--model.vocab_size=257", "--data.dataset_path=missing"]
    assert run("config", "check", path, "--world=2", *away) == 65
    said += capsys.readouterr().out.splitlines()
    assert said[0] == said[1]
    assert said[0].startswith("one of 2 ranks needs about ")
    found = re.findall(r"([0-9.]+) (GB|MB|kB|B)\b", said[0])
    total, *parts = [float(size) * BYTES[unit] for size, unit in found]
    rounded = sum(0.05 * BYTES[unit] for _, unit in found)
    assert sum(parts) == pytest.approx(total, abs=rounded)


def test_check_says_what_is_sent_and_why(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = ["--model.vocab_size=257", "--world=8"]
    assert run("config", "check", path, *needs, "--nodes=2") == 0
    _, choice, traffic, _, _ = capsys.readouterr().out.splitlines()
    assert choice.startswith("communication: reduce_gradients=micro_batch, reshard_after_forward=")
    assert re.fullmatch(
        r"in a step each node sends [0-9.]+ [GMk]B to other nodes and [0-9.]+ [GMk]B among its 4 "
        "ranks",
        traffic,
    )
    assert run("config", "check", path, *needs, "--gpu-memory=0") == 0
    _, choice, traffic, _, _ = capsys.readouterr().out.splitlines()
    assert "reshard_after_forward=always: it takes least memory, which the CPU ranks" in choice
    assert re.fullmatch(r"in a step each node sends [0-9.]+ [GMk]B among its 8 ranks", traffic)
    assert run("config", "check", path, *needs, "--nodes=3") == 2
    assert "8 ranks are not equally many on each of 3 nodes" in capsys.readouterr().err


def test_check_says_how_the_ranks_are_divided(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = ["--parallelism.data_parallel_replicate_degree=2"]
    assert run("config", "check", path, "--world=8", *mesh) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[3] == "mesh of 8 ranks: replicate 2 x shard 4 x tensor 1"

    assert run("config", "check", path, "--world=7", *mesh) == 2
    assert "data_parallel_replicate_degree=2" in (error := capsys.readouterr().err)
    assert "does not divide the 7 ranks" in error

    assert run("config", "check", path, "--parallelism.tensor_parallel_degree=4") == 2
    said_of_data = capsys.readouterr().err
    assert "the rows of the vocabulary=257 (257 / 4 = 64.25)" in said_of_data
    assert "set model.vocab_multiple to a multiple of 4" in said_of_data


def test_check_misses_data(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", path, "--data.dataset_path=nowhere") == 65

    assert "data.dataset_path=nowhere: nowhere is not prepared data" in capsys.readouterr().err


def test_the_schema_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "schema") == 0

    schema = json.loads(capsys.readouterr().out)
    for key in known_keys():
        table = schema
        *sections, name = key.split(".")
        for section in sections:
            definition = table["properties"][section]["$ref"].rpartition("/")[2]
            table = schema["$defs"][definition]
        assert table["properties"][name]["description"], key


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0

    assert capsys.readouterr().out == f"kempner {kempner.__version__}\n"


def test_the_package_is_the_command(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kempner", "config", "show", path],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert tomli.loads(done.stdout)["train"]["max_steps"] == 1234


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ConfigError("no such key"), 2, "kempner: no such key\n"),
        (UsageError("not\nso"), 2, "kempner: not\\nso\n"),
        (DataError("shard 3 is short"), 65, "kempner: shard 3 is short\n"),
        (DivergedError("loss is nan"), 78, "kempner: loss is nan\n"),
        (RunError("something else"), 1, "kempner: something else\n"),
        (typer.BadParameter("too small"), 2, "kempner: Invalid value: too small (see kempner -h)"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, ""),
        (typer.Exit(7), 7, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_command_raises_becomes_its_exit_code(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> None:
        raise raised

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    monkeypatch.setattr("kempner.cli.app.app", app)

    assert run() == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("returned", [None, 0, 75, ExitCode.STOPPED, ExitCode.HUNG])
def test_what_a_command_returns_is_its_exit_code(
    returned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(lambda: returned)
    monkeypatch.setattr("kempner.cli.app.app", app)

    assert run() == (returned or 0)


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ZeroDivisionError("a defect")

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    monkeypatch.setattr("kempner.cli.app.app", app)

    with pytest.raises(ZeroDivisionError, match="a defect"):
        main([])


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("| true", 1, ""),
        (">/dev/full", 74, "kempner: the output cannot be written: No space left on device\n"),
        ("2>/dev/full --and-a-mistake", 2, ""),
        (">&-", 0, ""),
        (">&- 2>&- --and-a-mistake", 2, ""),
    ],
)
def test_an_output_that_takes_nothing(where: str, code: int, said: str) -> None:
    """A pipe without a reader ends a command in silence, and a closed output is no wish for one; an
    error's code does not depend on who reads it.
    """
    shell = f"{PYTHON} -m kempner config schema {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


ARMED = """
import signal, sys
from kempner.cli import entry
entry._arm(sys.argv[1:])
heavy = {"typer", "pydantic", "torch", "numpy"} & set(sys.modules)
print(signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None), *heavy)
"""


@pytest.mark.parametrize(("command", "armed"), [("train", True), ("config", False)])
def test_a_rank_traps_signals_before_anything_heavy_is_imported(command: str, armed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARMED, command, "debug.toml"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    )

    assert done.stdout.split() == [str(armed)]
