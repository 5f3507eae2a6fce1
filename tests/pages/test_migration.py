"""What docs/migration.md has on the right side of its diffs trains to the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import KEMPNER, ROOT
from patience import scaled

pytestmark = pytest.mark.timeout(600)

_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sides(heading: str) -> list[tuple[str, str]]:
    """Each program below a heading of the page, before and after the change."""
    page = (ROOT / "docs" / "migration.md").read_text()
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    diffs = [diff.splitlines() for diff in _DIFF.findall(section) if "#SBATCH" not in diff]
    return [(_without("+", diff), _without("-", diff)) for diff in diffs]


def _without(sign: str, diff: list[str]) -> str:
    return "\n".join(line[1:] for line in diff if not line.startswith(sign)) + "\n"


def run(folder: Path, *command: str) -> str:
    """What a program prints that ends well."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=scaled(240)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_both_sides_are_programs() -> None:
    found = [sides(heading) for heading in ("From submitit", "From torchrun")]
    found.append(sides("From Lightning's auto-requeue"))
    assert [len(programs) for programs in found] == [2, 1, 1]
    for before, after in [pair for programs in found for pair in programs]:
        compile(before, "before.py", "exec")
        compile(after, "after.py", "exec")
        assert "kempner" in after
        assert "kempner" not in before


def test_a_job_of_submitit_is_submitted_and_completes(tmp_path: Path) -> None:
    (_, launch), (_, train) = sides("From submitit")
    (tmp_path / "launch.py").write_text(launch)
    (tmp_path / "train.py").write_text(train)
    assert "completed 200" in run(tmp_path, sys.executable, "launch.py")
    assert (tmp_path / "curve.pt").exists()


@pytest.mark.parametrize("heading", ["From torchrun", "From Lightning's auto-requeue"])
def test_the_program_trains_on_two_ranks(heading: str, tmp_path: Path) -> None:
    ((_, after),) = sides(heading)
    (tmp_path / "train.py").write_text(after)
    command = [sys.executable, "train.py"]
    printed = run(tmp_path, *KEMPNER, "supervise", "--nproc", "2", "--", *command)
    assert "completed" in printed
    assert (tmp_path / "runs" / "train" / "checkpoints" / "latest").exists()
