"""What a start needs is checked in a second, and what is missing is told in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import write_tokens

from kempner.checkpoint.format.manifest import Identity, Manifest, TrainState, encode
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.store.commit import DiskRoom, judge_room
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, UsageError
from kempner.run.process.retry import StorageUnavailableError, StorageWaits
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Completed,
)
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.readiness import (
    Ready,
    check_ready,
    check_run_directory,
    complete_before,
    keep_accepted,
)

Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A small model, and data for it, in the current folder."""
    monkeypatch.chdir(tmp_path)
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
SETS = ("--eval.interval=5", '--eval.sets={text = "held-out", code = "other"}')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.dataset_path=typo"], "data.dataset_path=typo: typo is not prepared data"),
        (["--model.vocab_size=256"], "has 257 token ids: set --model.vocab_size=257"),
        (["--train.seq_len=250"], "data.dataset_path=tokens: the data holds 250 tokens"),
        (EVALUATE, "eval.dataset_path=other: other is not prepared data"),
        (SETS, "eval.sets.code=other: other is not prepared data"),
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
    with pytest.raises(DataError, match=r"eval\.sets\.code=other: .*or remove eval\.sets\.code"):
        check_ready(configure(*SETS), RUN, {})


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


def test_checkpoints_that_are_gone_are_missed_before_any_rank_starts(
    configure: Configure,
) -> None:
    config = configure()
    begin_attempt(RUN)
    Ledger(RUN.ledger).record(CheckpointCommitted(40, 1), 1)
    (RUN.checkpoints / "step-00000040").mkdir(parents=True)
    with pytest.raises(DataError, match="ledger says that step 40 was committed: copy it back"):
        check_ready(config, RUN, {})
    moved = configure("--checkpoint.dir=elsewhere")
    with pytest.raises(DataError, match="elsewhere: no checkpoint is there, although the ledger"):
        check_ready(moved, RUN, {})


def test_a_place_that_is_gone_with_all_above_it_begins_no_other_run(
    patient: StorageWaits,
) -> None:
    patient.configure(0.05)
    run = RunDirectory(Path("/not-mounted/runs/run"))
    with pytest.raises(StorageUnavailableError, match="is the file system mounted"):
        Lease.acquire(run, 3.0, restarts=1)
    assert not Path("/not-mounted").exists()


def test_a_job_whose_first_launch_ended_before_it_made_a_run_makes_it(
    tmp_path: Path, patient: StorageWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.configure(0.05)
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("runs") / "never-made")
    Lease.acquire(run, 3.0, restarts=1).release()
    assert run.supervisors.is_dir()


STEPS = 1000


def complete(config: Config, done: int = STEPS, code: int = 0, left_at: int | None = None) -> None:
    """What a run leaves that has ended so, after its last step or before."""
    keep_accepted(RUN, config)
    ledger = Ledger(RUN.ledger)
    ledger.record(AttemptStarted(1), 1)
    ledger.record(Completed(done), 1)
    ledger.record(AttemptEnded(code, "", None, {"0": code}, left_at=left_at), 1)
    folder = CheckpointFolder(RUN.checkpoints)
    folder.step(done).mkdir(parents=True, exist_ok=True)
    manifest = Manifest(TrainState(step=done), Identity(1, {}, 0, "", {}), 1, 0.0, {})
    (folder.step(done) / MANIFEST).write_bytes(encode(manifest))


@pytest.mark.parametrize(
    ("change", "nothing"),
    [
        (lambda: None, True),
        (lambda: [f"--train.max_steps={2 * STEPS}"], False),
        (lambda: ["--optimizer.lr=0.5"], False),
        (lambda: RUN.gave_up.write_text("why"), False),
        (lambda: shutil.rmtree(RUN.checkpoints), False),
        (lambda: next(RUN.checkpoints.glob(f"*/{MANIFEST}")).write_text("{}"), False),
        (lambda: Ledger(RUN.ledger).record(AttemptStarted(1), 2), False),
        (lambda: RUN.accepted.unlink(), False),
        (lambda: RUN.ledger.write_text(""), False),
    ],
)
def test_a_complete_run_is_started_again_only_where_something_has_changed(
    configure: Configure, change: Callable[[], object], nothing: bool
) -> None:
    steps = f"--train.max_steps={STEPS}"
    complete(configure(steps))
    changed = change()
    config = configure(*(changed if isinstance(changed, list) else [steps]))
    told = complete_before(config, RUN)
    assert bool(told) is nothing
    assert ("nothing is started" in told) is nothing


def test_a_run_that_only_seems_complete_goes_on(configure: Configure) -> None:
    config = configure(f"--train.max_steps={STEPS}")
    for left in ({"done": STEPS - 1}, {"code": 75}, {"left_at": 40}):
        complete(config, **left)  # type: ignore[arg-type]
        assert complete_before(config, RUN) == ""


PROGRAM = {
    "train.py": "import helper\n",
    "helper.py": "x = 1\n",
    "conf/base.yaml": "lr: 1\n",
    "steps.txt": "100\n",
}


@pytest.mark.parametrize("file", [*PROGRAM, "conf/new.yaml", None])
def test_a_complete_program_is_started_again_where_a_file_of_it_is_newer(
    configure: Configure, file: str | None
) -> None:
    for name, text in PROGRAM.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    command, config = ["python", "train.py", "--steps", "steps.txt"], configure()
    complete(config)
    assert "nothing is started" in complete_before(config, RUN, command)
    assert complete_before(config, RUN, ["bash", "wrapped.sh"]) == ""  # who knows what that reads
    if file is not None:
        Path(file).write_text("y = 2\n")
    assert bool(complete_before(config, RUN, command)) is (file is None)
