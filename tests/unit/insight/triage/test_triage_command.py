"""`kempner triage`: what it prints, and its exit codes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kempner.cli.entry import main

LOGS = Path(__file__).parent / "logs"

Captured = pytest.CaptureFixture[str]


def run(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["triage", *map(str, arguments)])
    return left.value.code


def test_a_cause_is_told_with_place_and_advice(capsys: Captured) -> None:
    assert run(LOGS / "made" / "label_import_on_node2.log") == 0
    shown = capsys.readouterr().out
    assert "(import_error, certain)" in shown
    assert "failed first       rank 5 on n2" in shown
    assert "line of code       /home/u/train.py:7 in <module>" in shown
    assert "what to do         install it" in shown
    assert "ranks 0-4, 6-7: SIGTERM (15)" in shown


def test_no_cause_is_exit_code_1_and_the_most_likely_lines(capsys: Captured) -> None:
    assert run(LOGS / "made" / "unknown_words.log") == 1
    shown = capsys.readouterr().out
    assert "(unknown)" in shown
    assert "unknown_words.log:3: FATAL: frob table exhausted at slot 17" in shown


def test_runs_and_logs_together_as_json(capsys: Captured) -> None:
    assert run("--json", LOGS / "ran" / "killed", LOGS / "made" / "disk.log") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["cause"], first["rank"], first["sure"]) == ("killed", 1, "likely")
    assert (second["cause"], second["rank"], second["sure"]) == ("disk_full", 1, "certain")


def test_a_folder_stands_for_its_logs(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other").write_text("ValueError: not a log\n")
    with gzip.open(tmp_path / "rank-3.log.gz", "wt") as file:
        file.write("KeyError: 'x'\n")
    assert run(tmp_path) == 0
    assert "failed first       rank 3" in capsys.readouterr().out


def test_the_output_of_a_job_stands_for_its_run(tmp_path: Path, capsys: Captured) -> None:
    output = tmp_path / "job.out"
    output.write_text(f"starting\nrun directory: {LOGS / 'ran' / 'oom'}\nValueError: no\n")
    assert run(output) == 0
    assert "host_out_of_memory" in capsys.readouterr().out
    output.write_text("run directory: gone\nkempner: rank 1 was killed by SIGKILL at step 6\n")
    assert run(output) == 0
    assert "failed first       rank 1" in capsys.readouterr().out


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert run(tmp_path / "gone.log") == 2
    assert "gone.log is not there" in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "neither a run, which has a ledger.jsonl, nor a folder with logs" in (
        capsys.readouterr().err
    )
    assert run() == 2
    assert "RUN_DIR|LOG... is missing" in capsys.readouterr().err
