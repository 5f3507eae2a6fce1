"""What a start needs is checked in a second, and what is missing is told in one sentence."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import write_tokens

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.store.commit import DiskRoom, judge_room
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.run.output import logs
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, UsageError
from kempner.run.process.retry import StorageUnavailableError, StorageWaits
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.readiness import Ready, check_ready, check_run_directory

Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A small model, and data for it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    logs.configure()
    write_tokens(Path("tokens"), [range(200), range(50)])
    write_tokens(Path("held-out"), [range(100)])

    def configured(*arguments: str) -> Config:
        defaults = {"model.dim": 32, "train.seq_len": 32, "data.dataset_path": "tokens"}
        named = {argument[2:].partition("=")[0] for argument in arguments}
        given = [f"--{key}={value}" for key, value in defaults.items() if key not in named]
        return load(None, [*given, *arguments])

    return configured


RUN = RunDirectory(Path("runs/run"))


def test_all_is_there_and_nothing_is_written(configure: Configure) -> None:
    config = configure("--eval.dataset_path=held-out", "--eval.interval=5")
    check_run_directory(RUN, {})
    assert check_ready(config, RUN, {}) == Ready(vocab_size=257)
    assert check_ready(configure("--model.vocab_size=300"), RUN, {}).vocab_size == 300
    assert {path.name for path in Path().iterdir()} == {"held-out", "tokens"}


EVALUATE = ("--eval.interval=5", "--eval.dataset_path=other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.dataset_path=typo"], "data.dataset_path=typo: typo is not prepared data"),
        (["--model.vocab_size=256"], "has 257 token ids: set --model.vocab_size=257"),
        (["--train.seq_len=250"], "data.dataset_path=tokens: the data holds 250 tokens"),
        (EVALUATE, "eval.dataset_path=other: other is not prepared data"),
    ],
)
def test_data_that_does_not_do(configure: Configure, arguments: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_ready(configure(*arguments), RUN, {})


def test_held_out_data_of_another_tokenizer(configure: Configure) -> None:
    write_tokens(Path("other"), [range(100)])
    index = json.loads(Path("other/index.json").read_text())
    index["tokenizer"] = {"kind": "huggingface", "fingerprint": "0" * 64}
    Path("other/index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"eval\.dataset_path=other: .*another tokenizer"):
        check_ready(configure(*EVALUATE), RUN, {})


def test_token_files_that_are_missing_or_cut_off(configure: Configure) -> None:
    config, file = configure(), Path("tokens/part-1.tokens")
    os.truncate(file, 100)
    with pytest.raises(
        DataError, match=r"part-1\.tokens has 100 bytes, the index says 164; copy it"
    ):
        check_ready(config, RUN, {})
    file.unlink()
    with pytest.raises(DataError, match=r"part-1\.tokens: No such file or directory; copy it"):
        check_ready(config, RUN, {})


def test_data_that_this_run_has_read_is_waited_for(
    configure: Configure, patient: StorageWaits
) -> None:
    config = configure()
    begin_attempt(RUN)
    RUN.config.write_text('[data]\ndataset_path = "tokens"\n')
    patient.configure(0.05)
    Path("tokens/part-0.tokens").unlink()
    with pytest.raises(StorageUnavailableError):
        check_ready(config, RUN, {})
    Path("tokens/index.json").unlink()
    with pytest.raises(StorageUnavailableError):
        check_ready(config, RUN, {})


def test_checkpoints_that_nobody_may_look_at_are_left_to_the_ranks(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: CheckpointFolder) -> list[int]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(CheckpointFolder, "committed", refuse)
    assert check_ready(configure(), RUN, {}) == Ready(vocab_size=257)


@pytest.mark.parametrize("there", ["runs", "runs/run"])
def test_a_run_directory_that_is_a_file(configure: Configure, there: str) -> None:
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).touch()
    with pytest.raises(UsageError, match=f"{there} is a file; set run.dir and run.name"):
        check_run_directory(RUN, {})


def test_run_directories_that_cannot_be(configure: Configure) -> None:
    with pytest.raises(UsageError, match="a name is too long"):
        check_run_directory(RunDirectory(Path("x" * 300)), {})
    Path("loop").symlink_to("loop")
    with pytest.raises(UsageError, match="symbolic links"):
        check_run_directory(RunDirectory(Path("loop/run")), {})
    RUN.ledger.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"ledger\.jsonl is a folder"):
        check_run_directory(RUN, {})


@pytest.mark.parametrize(
    ("free", "there", "room"),
    [
        (99, 0, DiskRoom("", refused=True)),
        (100, 0, DiskRoom("short")),
        (399, 0, DiskRoom("short")),
        (400, 0, DiskRoom()),
        (399, 3, DiskRoom()),
        (100, 9, DiskRoom()),
        (99, 9, DiskRoom("", refused=True)),
    ],
)
def test_room_for_checkpoints(free: int, there: int, room: DiskRoom) -> None:
    """Three stay, and a fourth is written before the oldest is deleted."""
    judged = judge_room(free, size=100, there=there, keep=3)
    assert judged.refused is room.refused
    assert bool(judged.sentence) is (room != DiskRoom())


def test_a_model_too_large_for_the_disk_is_refused_at_the_first_start_only(
    configure: Configure,
) -> None:
    huge = configure("--model.dim=200000", "--model.n_layers=100")
    with pytest.raises(CheckpointWriteError, match="runs/run/checkpoints: a checkpoint needs"):
        check_ready(huge, RUN, {})
    (warning,) = check_ready(huge, RUN, {"SLURM_RESTART_COUNT": "1"}).warnings
    assert "free disk space" in warning
