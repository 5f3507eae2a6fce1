"""Help, versions, completion, and ends of a command that are no bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import scaled
from saved import commit_state

import kempner
from kempner.cli.entry import main
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]

COMMANDS = (
    *(
        "",
        "sample",
        "prune",
        "prepare",
        "download",
        "plan",
        "train",
        "supervise",
        "status",
        "logs",
        "stop",
        "eval",
        "wrap",
        "triage",
        "completion",
        "config",
        "config show",
    ),
    *(
        "config check",
        "config explain",
        "config convert",
        "checkpoint",
        "checkpoint list",
        "checkpoint verify",
    ),
    *("checkpoint prune", "checkpoint export", "checkpoint import"),
)


def run(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help_and_the_version(command: str, capsys: Captured) -> None:
    words = command.split()
    shown = []
    for asked in ([*words, "-h"], [*words, "--help"], ["help", *words]):
        assert run(*asked) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert shown[0].split()[: 2 + len(words)] == ["Usage:", "kempner", *words]
    assert run(*words, "--version") == 0
    assert capsys.readouterr().out == f"kempner {kempner.__version__}\n"


def test_the_help_has_what_is_used_every_day_first(capsys: Captured) -> None:
    assert run("-h") == 0
    everyday, _, rare = capsys.readouterr().out.partition("Now and then:")
    named = lambda text: {line.split()[0] for line in text.splitlines() if line[:3].strip()}  # noqa: E731
    assert {"supervise", "status", "logs", "stop", "eval"} <= named(everyday)
    assert {"wrap", "join", "download", "completion"} <= named(rare)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("experts model", "kempner plan MODEL --world N"),
        ("checkpoint compare a b", "kempner compare A B"),
    ],
)
def test_an_earlier_spelling_is_told_the_new_one(old: str, new: str, capsys: Captured) -> None:
    assert run(*old.split()) == 2
    assert f" is part of another command now: {new} (see kempner" in capsys.readouterr().err


def test_a_word_is_shown_as_text_where_the_locale_is_plain_c() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kempner", "status", "🙂"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(rb"kempner: \U0001f642 is not a run")


@pytest.mark.parametrize("group", ["", "checkpoint", "config"])
def test_a_group_of_commands_alone_shows_its_help(group: str, capsys: Captured) -> None:
    assert run(*group.split(), "-h") == 0
    help_text = capsys.readouterr().out
    assert run(*group.split()) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.strip() == help_text.strip()


def test_the_version_after_the_dashes_is_the_program_s(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert run("supervise", "--nproc", "0", "--", "python", "--version") == 2
    assert "--nproc must be at least 1" in capsys.readouterr().err


COMPLETE = """
source <(kempner completion bash)
for words in "kempner stat" "kempner checkpoint ver" "kempner supervise --np"; do
    COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _kempner_completion kempner "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[@]}"
done
complete -p kempner
"""


def test_bash_completes_commands_and_options() -> None:
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
    )
    assert done.stderr == ""
    *completed, registered = done.stdout.splitlines()
    assert completed == ["status", "verify", "--nproc"]
    assert registered.endswith("-F _kempner_completion kempner")


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef kempner"), ("fish", "complete ")])
def test_other_shells_get_a_script(shell: str, words: str, capsys: Captured) -> None:
    assert run("completion", shell) == 0
    assert words in capsys.readouterr().out


INTERRUPTED = """
import os, signal, sys
from kempner.cli.entry import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
main(sys.argv[2:])
"""


@pytest.mark.parametrize("module", ["typer", "kempner.insight.status"])
def test_ctrl_c_while_a_command_imports_is_no_traceback(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "status", "run"],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_full_disk_is_the_same_for_every_command(
    tmp_path: Path, small_disk: Path, capsys: Captured
) -> None:
    (tmp_path / "text.txt").write_text("a" * (6 << 20))
    record = RunDirectory(tmp_path / "run")
    commit_state(record, {"model.weight": torch.ones(1200, 1000)}, 10)
    export = ("checkpoint", "export", record.path, "--format")
    for command in (
        ("prepare", tmp_path / "text.txt", "--workers", 1, "--out", small_disk / "tokens"),
        (*export, "dcp", "--out", small_disk / "dcp"),
        (*export, "torch", "--out", small_disk / "torch"),
        ("checkpoint", "import", record.checkpoints / "step-00000010", "--into", small_disk / "r"),
    ):
        assert run(*command) == 74
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert "cannot be written: No space left on device" in sentence
        assert str(small_disk) in sentence
