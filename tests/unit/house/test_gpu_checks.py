"""`benchmarks/models/gpu.py` itself, with what a CPU can show of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import records
from patience import scaled

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "models" / "gpu.py"


@pytest.mark.parametrize("planted", ["", "no checkpoint is found"])
def test_the_checks_of_a_gpu_run_on_a_cpu_and_one_that_fails_is_told(
    planted: str, tmp_path: Path
) -> None:
    plant = "CheckpointEngine.restore = lambda *_: None; " if planted else ""
    sizes = ["--device", "cpu", "--dim", "32", "--layers", "1", "--seq", "16"]
    record = tmp_path / "record.jsonl"
    program = (
        "import sys, runpy; from kempner.checkpoint.manager import CheckpointEngine; "
        f"{plant}sys.argv = {['gpu.py', *sizes, '--record', str(record)]!r}; "
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(200)
    )
    verdicts = {row["check"]: row["verdict"] for row in records.read(record)}
    held = "FAILED" if planted else "passed"
    assert verdicts == {
        "staging": held,
        "pinned": "not here",
        "deterministic_resume": held,
        "no_sync": "not here",
        "memory": "not here",
        "speed": "not here",
        "stop": "passed",
        "bf16": "passed",
        "any_world": "passed",
    }, ended.stderr
    assert ended.returncode == (1 if planted else 0)
