"""What `kempner supervise` makes of its arguments: a configuration, or a command after `--`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kempner.cli import supervise
from kempner.cli.app import app
from kempner.cli.supervise import (
    UNCHANGED_FOR,
    LauncherName,
    _load,
    _load_for_job,
    await_saved,
    choose_launcher,
)
from kempner.config.errors import ConfigError
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.record.events import AttemptStarted
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import daemon
from kempner.supervisor.launchers import exec_rank
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.readiness import keep_accepted

SCRIPT = ("python", "-u", "work/my_train.py", "--lr", "3")


@pytest.mark.parametrize(
    ("overrides", "command", "task", "name"),
    [
        ([], SCRIPT, "", "my_train"),
        (["--run.name=mine"], SCRIPT, "", "mine"),
        (["--run.name=mine"], SCRIPT, "4", "mine-4"),
        (["--supervise.lease=9"], SCRIPT, "4", "my_train-4"),
        (["--run.name=mine"], ("torchrun", "-m", "package"), "", "mine"),
    ],
)
def test_a_run_is_named_by_hand_or_after_its_script(
    overrides: list[str],
    command: tuple[str, ...],
    task: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
    config, words = _load(None, overrides, command)
    assert config.run.name == name
    assert words[-len(command) - 1 :] == ["--", *command]


def test_each_command_gets_a_run_and_none_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("import os\nseed = os.environ.get('SEED')\n")
    seen: dict[str, tuple[object, ...]] = {}
    for seed in ("1", "2"):
        monkeypatch.setenv("SEED", seed)
        for script in ("one/train.py", "two/train.py"):
            for words in ((), ("--lr=1",), ("--lr=2",)):
                config, _ = _load(None, [], ("python", script, *words))
                name = str(config.run.name)
                assert seen.setdefault(name, (seed, script, words)) == (seed, script, words)
                again, _ = _load(None, [], ("torchrun", "--nnodes=1", script, *words, "--resume"))
                assert again.run.name == name
                with pytest.raises(UsageError, match="would not be this program's result"):
                    _load(None, [f"--run.name={name}"], ("python", script, "--lr=3"))
    assert len(seen) == 12
    assert "train" in seen


def test_the_element_of_an_array_keeps_a_name_given_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text("")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    config, words = _load(str(tmp_path / "tiny.toml"), ["--run.name=mine", "--train.seed=3"], ())
    assert (config.run.name, config.train.seed) == ("mine-4", 3)
    assert words == [str(tmp_path / "tiny.toml"), "--train.seed=3", "--run.name=mine-4"]


@pytest.mark.parametrize(
    ("overrides", "command", "error", "said"),
    [
        ([], ("torchrun", "-m", "package"), UsageError, "give the run a name: kempner supervise"),
        ([], (), UsageError, "name a configuration, or a command after `--`"),
        (["--run.nmae=x"], SCRIPT, ConfigError, "run.name"),
        (["--supervise.lease=0"], SCRIPT, ConfigError, "--supervise.lease=0"),
    ],
)
def test_what_cannot_be_is_refused(
    overrides: list[str], command: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said.replace("`", ".")):
        _load(None, overrides, command)


GOOD = "[train]\nmax_steps = 7\n"

DAMAGE = {
    "half saved": lambda file: file.write_text(GOOD + "[optimizer]\nlr = 3e"),
    "mistyped": lambda file: file.write_text(GOOD.replace("steps", "stepz")),
    "of another kind": lambda file: file.write_text(GOOD.replace("7", '"seven"')),
    "empty": lambda file: file.write_text(""),
    "gone": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "of another run": lambda file: file.write_text(GOOD + '[run]\nname = "b"\n'),
}


@pytest.fixture
def came_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Job 7 has run `runs/a` by `a.toml`, and has been requeued."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(GOOD)
    run = RunDirectory(Path("runs/a"))
    run.path.mkdir(parents=True)
    keep_accepted(run, _load("a.toml", ["--train.seed=3"], ())[0])
    Ledger(run.ledger).record(AttemptStarted(1, job="7", restarts=0), 1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(supervise, "UNCHANGED_FOR", 0.0)
    return run


@pytest.mark.parametrize("how", DAMAGE)
def test_what_worked_in_a_job_is_never_final_when_it_comes_back(
    how: str,
    came_back: RunDirectory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    DAMAGE[how](Path("a.toml"))
    config, given = _load_for_job("a.toml", ["--train.seed=3"], (), None)
    assert (config.train.max_steps, config.train.seed, config.run.name) == (7, 3, "a")
    assert given == ["a.toml", "--train.seed=3"]  # with which it is submitted again
    said = capfd.readouterr().err
    assert f"it goes on with {came_back.accepted.absolute()}, the configuration that" in said
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # another job is a person's first try
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    if how in ("empty", "of another run"):
        assert _load_for_job("a.toml", [], (), None)[0].train.max_steps != 7 or how != "empty"
        return
    with pytest.raises(ConfigError):
        _load_for_job("a.toml", ["--train.seed=3"], (), None)


def test_a_configuration_that_was_changed_and_is_right_counts(came_back: RunDirectory) -> None:
    Path("a.toml").write_text(GOOD.replace("7", "9"))
    assert _load_for_job("a.toml", [], (), None)[0].train.max_steps == 9


def test_a_file_that_is_being_saved_is_waited_for(tmp_path: Path) -> None:
    file, paused = tmp_path / "a.toml", list[float]()
    file.write_text("")
    begin = file.stat().st_mtime

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 2:
            file.write_text(GOOD)

    await_saved(file, lambda: begin + len(paused), pause)
    assert len(paused) >= UNCHANGED_FOR - 1
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        await_saved(file, lambda: begin + 3600, pause)


def test_what_follows_the_dashes_is_nobodys_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Program] = []

    def follow(run: object, launcher: object, program: Program, *_: object) -> ExitCode:
        started.append(program)
        return ExitCode.COMPLETED

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(daemon, "supervise", follow)
    deaf = type("Deaf", (), {"install": lambda _: None, "pause_within": lambda *_: None})
    monkeypatch.setattr(supervise, "inbox", deaf)
    own = ["python", "my.py", "--nproc", "7", "--", "--train.seed=3", "--help"]
    given = ["supervise", "--run.name=x", "--nproc", "2", "--", *own]
    assert app(args=given, prog_name="kempner", standalone_mode=False) == 0
    assert started == [Program((sys.executable, "-P", "-m", exec_rank.__name__, *own), ours=False)]


@pytest.mark.parametrize(
    ("configured", "environ", "nproc", "jobid", "chosen", "said"),
    [
        ("auto", {}, None, None, "local", ""),
        ("auto", {}, 4, None, "local", ""),
        ("auto", {"SLURM_JOB_ID": "7"}, None, None, "srun", "in job 7: starting the ranks with"),
        ("auto", {"SLURM_JOB_ID": "7"}, 2, None, "local", "neither watched nor requeued"),
        ("auto", {}, None, "8", "srun", "in job 8"),
        ("local", {"SLURM_JOB_ID": "7"}, None, None, "local", ""),
        ("torchrun", {"SLURM_JOB_ID": "7"}, None, None, "torchrun", ""),
    ],
)
def test_inside_of_a_job_nobody_trains_one_rank_without_a_word(
    configured: str,
    environ: dict[str, str],
    nproc: int | None,
    jobid: str | None,
    chosen: str,
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert choose_launcher(configured, environ, nproc, jobid) is LauncherName(chosen)
    told = capfd.readouterr().err
    assert said in told
    assert bool(said) is bool(told)
