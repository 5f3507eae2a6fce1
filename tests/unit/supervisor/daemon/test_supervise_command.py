"""What `kempner supervise` makes of its arguments: a configuration, or a command after `--`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kempner.cli import supervise
from kempner.cli.app import app
from kempner.cli.supervise import LauncherName, _load, choose_launcher
from kempner.config.errors import ConfigError
from kempner.run.output import logs
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.supervisor import daemon
from kempner.supervisor.launchers import exec_rank
from kempner.supervisor.launchers.base import Program

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
    logs.configure()
    assert choose_launcher(configured, environ, nproc, jobid) is LauncherName(chosen)
    told = capfd.readouterr().err
    assert said in told
    assert bool(said) is bool(told)
