"""`kempner wrap`: batch scripts as people write them, and what becomes of each.

What is expected of a script was written before the code: `NAME.expected` has the lines that go and
come, or the sentence that refuses it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kempner.cli.entry import main
from kempner.project.wrap.decide import Refused, Wrapped, diff, wrap

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "batch_scripts"
PYTHON = "/env/bin/python"
Captured = pytest.CaptureFixture[str]


def changed(found: Wrapped | Refused, before: bytes) -> str:
    """The lines that go and come, or the sentence of a refusal."""
    if isinstance(found, Refused):
        return f"refused: {found.sentence}\n"
    lines = diff(before, found, "job").splitlines(keepends=True)[2:]
    return "".join(line for line in lines if line[0] in "+-")


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda file: file.stem)
def test_a_script_becomes_what_was_written_down_before(file: Path) -> None:
    before = file.read_bytes()
    found = wrap(before, PYTHON, file.name)
    assert changed(found, before) == file.with_suffix(".expected").read_text()
    if isinstance(found, Wrapped):
        subprocess.run(["bash", "-n"], input=found.text, check=True)
        again = wrap(found.text, PYTHON, file.name)
        assert isinstance(again, Refused)
        assert "starts kempner already" in again.sentence or "traps TERM" in again.sentence


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("srun --pty python train.py", "gives srun --pty, of which kempner has no equal"),
        ("srun --container-image=x python train.py", "has --container-image, and kempner opens"),
        ("srun --het-group=0 python train.py", "starts a part of a heterogeneous job"),
        ("srun -n $N python train.py", "gives srun --ntasks=$N, which kempner cannot read"),
        ("srun -n 3 -N 2 python train.py", "starts 3 tasks, which kempner cannot divide among 2"),
        ("srun --export=ALL,A=1 python train.py", "gives its tasks variables (--export=ALL,A=1)"),
        ("srun --chdir=sub python train.py", "gives srun --chdir, of which kempner has no equal"),
        ("python -m torch.distributed.launch train.py", "gives the program --local-rank"),
        ("N=$(hostname); X=tcp://$N:1; python train.py --at $X", "gives the program $X, which is"),
        ("srun $LAUNCHER train.py", "its command is in $LAUNCHER: write it out"),
        ("srun -N 1 -n 2 torchrun train.py", "starts 2 of torchrun on a node: have srun start one"),
        ("torchrun --run-path train.py", "gives torchrun --run-path, of which kempner has no"),
        ("accelerate launch train.py", "takes its number of processes from elsewhere"),
        ("python train.py && echo done", "has other commands behind the program"),
        ("(cd sub; python train.py)", "starts the program within a subshell: move it out"),
        ("if test -d x; then python train.py; fi", "starts the program within a branch"),
        ("f() { python train.py; }; f", "starts the program within a function"),
        ("python train.py & wait", "starts the program in the background"),
        ("python train.py; scontrol requeue $SLURM_JOB_ID", "requeues the job, as kempner does"),
        ("kempner supervise -- python train.py", "starts kempner already: nothing is missing"),
        ("echo hello", "none of its lines starts Python, srun, torchrun or accelerate"),
        ("if python train.py", "cannot be read as a command of bash"),
    ],
)
def test_what_is_not_certain_is_refused(command: str, sentence: str) -> None:
    found = wrap(f"#!/bin/bash\n#SBATCH --gpus=1\n{command}\n".encode(), PYTHON, "job.sh")
    assert isinstance(found, Refused)
    assert sentence in found.sentence
    assert "\n" not in found.sentence


def test_a_line_is_named_where_several_start_a_program() -> None:
    before = (SCRIPTS / "steps_after.sbatch").read_bytes()
    found = wrap(before, PYTHON, "job.sh", line=4)
    assert isinstance(found, Wrapped)
    assert b"python prepare.py\ntrap 'kill -TERM $!' TERM" in found.text
    assert found.text.endswith(b"|| exit $kempner\npython evaluate.py\n")


FAKE_SBATCH = """#!/bin/sh
[ "$1" = --test-only ] || exit 9
grep -q kempner "$2" || exit 8
[ ! -e refuse ] || { echo "sbatch: error: Invalid partition name specified" >&2; exit 1; }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a batch script, and an sbatch that refuses where there is a file `refuse`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(FAKE_SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    shutil.copy(SCRIPTS / "plain.sbatch", tmp_path / "job.sbatch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["wrap", *arguments])
    return left.value.code


def test_the_diff_is_shown_written_and_applied(folder: Path, capsys: Captured) -> None:
    script, before = folder / "job.sbatch", (folder / "job.sbatch").read_bytes()
    script.chmod(0o750)
    assert run("job.sbatch") == 0
    shown = capsys.readouterr()
    assert "sbatch --test-only: accepted" in shown.err
    assert "nothing was changed" in shown.err
    assert script.read_bytes() == before

    assert run("job.sbatch", "-o", "new.sbatch") == 0
    assert run("job.sbatch", "--write") == 0
    assert script.read_bytes() == (folder / "new.sbatch").read_bytes() != before
    assert (folder / "job.sbatch.bak").read_bytes() == before
    assert script.stat().st_mode & 0o777 == 0o750
    patched = subprocess.run(
        ["patch", "-o", "-", "job.sbatch.bak"],
        input=shown.out.encode(),
        capture_output=True,
        check=True,
    )
    assert patched.stdout == script.read_bytes()


def test_nothing_is_overwritten_and_nothing_that_sbatch_refuses_is_written(
    folder: Path, capsys: Captured
) -> None:
    before = (folder / "job.sbatch").read_bytes()
    (folder / "job.sbatch.bak").write_text("mine")
    (folder / "there").write_text("mine")
    assert run("job.sbatch", "--write") == 2
    assert "job.sbatch.bak is there already" in capsys.readouterr().err
    assert run("job.sbatch", "-o", "there") == 2
    assert "there is there already: name a new file" in capsys.readouterr().err
    (folder / "job.sbatch.bak").unlink()
    (folder / "refuse").touch()
    assert run("job.sbatch", "--write") == 2
    assert "Invalid partition name specified" in capsys.readouterr().err
    assert (folder / "job.sbatch").read_bytes() == before
    assert run("nowhere.sbatch") == 2
    assert run("job.sbatch", "--write", "-o", "new") == 2


def test_the_page_shows_what_is_printed() -> None:
    before = (SCRIPTS / "torchrun_one_node.sbatch").read_bytes()
    found = wrap(before, "/home/me/env/bin/python", "job.sbatch")
    assert isinstance(found, Wrapped)
    page = (ROOT / "docs" / "wrap.md").read_text()
    assert page.split("```diff\n")[1].split("```")[0] == diff(before, found, "job.sbatch")
