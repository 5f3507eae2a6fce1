"""What stands in README.md and docs/ is typed word by word, by a user with their own data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from blocks import Block, Reader, blocks_of, form
from harness import ROOT, wait_until, write_tokens
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from kempner.run.process.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(900)

ELSEWHERE = {
    "README.md: pip install .": "installs; `make walk` does",
    "docs/quickstart.md: pip install kempner": "installs; `make walk` does",
    "docs/quickstart.md: kempner init on-slurm": "on a cluster: tests/slurm/jobs/test_init.py",
    "docs/own_loop.md: pip install kempner": "installs; `make walk` does",
    "docs/trainer.md: pip install 'kempner[transformers]'": "installs; `make walk` does",
    "docs/lightning.md: pip install 'kempner[lightning]'": "installs; `make walk` does",
    "docs/accelerate.md: pip install 'kempner[accelerate]'": "installs",
    "docs/wrap.md: pip install kempner": "installs; `make walk` does",
    "docs/wrap.md: kempner wrap job.sbatch": "on a cluster: "
    "tests/slurm/stops/test_wrapped_scripts.py",
    "docs/admins.md: scontrol show config | grep -E 'JobRequeue|KillWait|PreemptMode|"
    "AccountingStorageType'": "on a cluster: `make walk`",
    "docs/communication.md: kempner config check configs/train/7b.toml --world 32 --nodes 8": "it "
    "asks for 81 GB of disk; its lines: tests/unit/config/test_config_command.py",
    "docs/plan.md: kempner plan configs/train/7b.toml --world 32 --nodes 8": "is longer than the "
    "terminal; the same to the letter: tests/unit/cli/test_plan_command.py",
    "docs/plan.md: kempner plan MiniMax-M2 --world 64": "needs a config.json; the same to "
    "the letter: tests/unit/cli/test_experts_command.py",
    "docs/by_hand.md: python by_hand.py": "tests/distributed/programs/test_by_hand.py",
    "docs/any_command.md: exec kempner supervise --launcher srun --run.name=mine -- python "
    "my_train.py": "on a cluster: tests/slurm/jobs/test_own_program.py",
    'docs/doctor.md: "$KEMPNER_PYTHON" -m kempner doctor "$@" --allocation': "on a cluster: "
    "tests/slurm/jobs/test_doctor_in_allocation.py",
    "docs/profiling.md: kempner profile runs/mine --rank 3 --steps 2": "needs a run that trains: "
    "tests/distributed/insight/test_profile_of_a_run.py",
    "docs/slurm.md: sbatch --nodes=2 --time=00:30:00 scripts/slurm/multinode.sh train.toml "
    "--train.max_steps=20 --run.name=first": "on a cluster: tests/slurm/jobs/test_init.py",
    "docs/slurm.md: kempner status 1": "on a cluster: tests/slurm/jobs/test_status.py",
    "docs/slurm.md: scontrol show job 1 | grep -o 'Restarts=[0-9]*'": "on a cluster: "
    "tests/slurm/jobs/test_status.py",
    "docs/slurm.md: grep checkpoint_committed runs/7b/ledger.jsonl | tail -1": "needs a run of the "
    "7B model; tests/unit/run/record/test_events.py has the line's fields",
}
"""Blocks that are not typed here, and why, or where instead."""

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    return blocks_of(ROOT / page, page)


def typed(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.name not in ELSEWHERE]


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """In a folder with texts and a tokenizer; `kempner` and `python` are those of this test."""
    texts = [f"line {n} of a text: {n * n % 977} follows {n - 1}\n" for n in range(3000)]
    (tmp_path / "my-texts").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "my-texts" / name).write_text("".join(texts))
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=600, special_tokens=special))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "bin").mkdir()
    for name, what in (("python", ""), ("kempner", "-m kempner")):
        starter = tmp_path / "bin" / name
        starter.write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
        starter.chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    return Reader(tmp_path, {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"})


def type_page(page: str, reader: Reader) -> int:
    """How many commands were typed."""
    commands = [command for block in typed(page) for command in block.commands]
    for command in commands:
        reader.type(command)
    return len(commands)


def test_the_readme_holds_for_ones_own_texts_and_tokenizer(reader: Reader) -> None:
    assert type_page("README.md", reader) >= 6
    config = (reader.folder / "train.toml").read_text()
    assert "vocab_size = " not in config


def test_the_quickstart_holds(reader: Reader) -> None:
    assert type_page("docs/quickstart.md", reader) >= 9
    assert (reader.folder / "report.html").exists()
    assert list((reader.folder / "exports" / "train").glob("*.safetensors"))


def test_the_page_on_own_loops_holds(reader: Reader) -> None:
    for name in ("surviving.py", "any_world.py"):
        shutil.copy(ROOT / "docs/examples" / name, reader.folder)
    assert type_page("docs/own_loop.md", reader) >= 2
    assert (reader.folder / "curve.pt").exists()


def test_the_page_on_any_command_holds(reader: Reader) -> None:
    own = 'import os, sys\nassert sys.argv[1:] == ["--my-option", "3"], os.environ["RANK"]\n'
    (reader.folder / "my_train.py").write_text(own)
    assert type_page("docs/any_command.md", reader) >= 1
    assert (reader.folder / "runs" / "mine" / "ledger.jsonl").exists()


def test_the_program_in_c_tells_its_steps_saves_when_asked_and_goes_on(tmp_path: Path) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    page = (ROOT / "docs" / "any_command.md").read_text()
    (source,) = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.c").write_text(source)
    command = [compiler, "-Wall", "-Werror", "-o", "train", "train.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    heartbeat = tmp_path / "heartbeat"
    environ = {"KEMPNER_HEARTBEAT_FILE": str(heartbeat)}
    with subprocess.Popen([tmp_path / "train"], cwd=tmp_path, env=environ) as program:
        wait_until(lambda: read_count(heartbeat) >= 5, "a fifth step", 60)
        program.send_signal(signal.SIGTERM)
        assert program.wait() == ExitCode.STOPPED
    stopped = read_count(tmp_path / "step.txt")
    assert 5 <= stopped < 200
    heartbeat.unlink()
    assert subprocess.run([tmp_path / "train"], cwd=tmp_path, env=environ).returncode == 0
    assert read_count(heartbeat) == read_count(tmp_path / "step.txt") == 200


def read_count(path: Path) -> int:
    """The number in a file; 0 where there is none yet."""
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


def test_the_pages_on_other_libraries_hold(reader: Reader) -> None:
    pages = {
        "trainer": ("with_transformers.py", "final/model.safetensors"),
        "lightning": ("with_lightning.py", "curve.pt"),
        "accelerate": ("with_accelerate.py", "curve/model.safetensors"),
    }
    for page, (example, made) in pages.items():
        shutil.copy(ROOT / "docs/examples" / example, reader.folder)
        assert type_page(f"docs/{page}.md", reader) >= 1
        assert (reader.folder / made).exists()


def test_the_page_on_configuration_holds(reader: Reader) -> None:
    shutil.copy(ROOT / "kempner/project/template/train.toml", reader.folder)
    (reader.folder / "data").mkdir()
    write_tokens(reader.folder / "data" / "train", [range(500)], "uint16", 32000)
    assert type_page("docs/configuration.md", reader) >= 1


def test_the_page_on_metrics_holds(reader: Reader) -> None:
    (reader.folder / "runs" / "mine").mkdir(parents=True)
    line = '{"step": 1, "attempt": 1, "loss": 5.0, "time": 1.0}\n'
    (reader.folder / "runs" / "mine" / "metrics.jsonl").write_text(line)
    assert type_page("docs/metrics.md", reader) == 3
    assert "kempner_loss" in (reader.folder / "mine.prom").read_text()


def test_the_page_on_triage_holds(reader: Reader) -> None:
    log = ROOT / "tests/unit/insight/triage/logs/made/missing_on_one_node.log"
    shutil.copy(log, reader.folder / "slurm-4711.out")
    assert type_page("docs/triage.md", reader) == 1


def test_the_page_on_status_holds(reader: Reader) -> None:
    (reader.folder / "runs" / "mine").mkdir(parents=True)
    line = '{"event": "completed", "step": 5, "attempt": 1, "time": 1.0}\n'
    (reader.folder / "runs" / "mine" / "ledger.jsonl").write_text(line)
    assert type_page("docs/status.md", reader) == 3


def test_the_page_on_the_doctor_holds(reader: Reader) -> None:
    shutil.copy(ROOT / "kempner/project/template/train.toml", reader.folder)
    (reader.folder / "data").mkdir()
    write_tokens(reader.folder / "data" / "train", [range(500)], "uint16", 32000)
    assert type_page("docs/doctor.md", reader) == 1


def test_each_block_is_typed_or_has_a_reason_not_to_be() -> None:
    here = {
        "README.md",
        *("docs/quickstart.md", "docs/own_loop.md", "docs/configuration.md", "docs/triage.md"),
        *("docs/metrics.md", "docs/status.md", "docs/doctor.md", "docs/any_command.md"),
        *("docs/trainer.md", "docs/lightning.md", "docs/accelerate.md"),
    }
    untested = [block.name for page in PAGES if page not in here for block in typed(page)]
    assert untested == []
    there = {block.name for page in PAGES for block in blocks(page)}
    assert sorted(ELSEWHERE.keys() - there) == []
    named = [Path(p) for why in ELSEWHERE.values() for p in re.findall(r"tests/\S+\.py", why)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def page_of(folder: Path, *lines: str) -> list[Block]:
    (folder / "page.md").write_text("\n".join(["text", "```console", *lines, "```", ""]))
    return blocks_of(folder / "page.md", "page.md")


def test_a_reader_compares_the_form_of_lines() -> None:
    assert form("step 29/600 ━━╺━━ loss 2.9546  11,388 tokens/s ETA 0:01:52") == (
        "step #/# loss # # tokens/s ETA #"
    )


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["$ echo done 12 times", "done 7 times"], ""),
        (["$ echo done", "something else"], "something else"),
        (["$ exit 3"], "ended with 3, not 0"),
        (["$ sleep 100", "^C"], "ended with -2, not 75"),
    ],
)
def test_a_reader_notices_what_is_not_so(
    lines: list[str], wrong: str, tmp_path: Path, reader_of: Callable[[Path], Reader]
) -> None:
    (block,) = page_of(tmp_path, *lines)
    if not wrong:
        reader_of(tmp_path).type(block.commands[0])
        return
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        reader_of(tmp_path).type(block.commands[0])


@pytest.fixture
def reader_of() -> Callable[[Path], Reader]:
    """One without patience."""
    return lambda folder: Reader(folder, {"PATH": os.environ["PATH"]}, waiting=5.0)
