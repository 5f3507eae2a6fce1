"""`kempner prepare` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kempner.cli import prepare
from kempner.data.files.index import read_index
from kempner.run.process.exit_codes import ExitCode, UsageError


def run(*arguments: object) -> int:
    return prepare.app([str(argument) for argument in arguments], standalone_mode=False)  # type: ignore[no-any-return]


def test_it_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("text")
    (texts / "b.txt").touch()
    (texts / "c.png").touch()
    assert run(texts, "--out", tmp_path / "out", "--workers", 1) == ExitCode.COMPLETED
    out, errors = capsys.readouterr()
    assert out == (
        f"{tmp_path}/out prepared: 5 tokens, 1 document, 1 token file, "
        "byte tokenizer of 257 tokens in uint16; empty documents skipped: 1; "
        f"files skipped because they are not text: 1, {texts}/c.png first\n"
    )
    assert "preparing: 4 of 4 bytes" in errors.replace("\n", " ")
    assert "\x1b" not in errors
    assert run(texts, "--out", tmp_path / "out", "--workers", 1) == ExitCode.COMPLETED
    assert f"{tmp_path}/out was prepared before, and is intact: 5 tokens" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "a.txt").write_text("text")
    run(tmp_path / "a.txt", "--out", tmp_path / "out", "--workers", 1)
    assert "━" in capsys.readouterr().err


def test_it_takes_all_its_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "text"}')
    run(
        tmp_path / "a.jsonl", "--out", tmp_path / "out", "--text-key", "body", "--tokenizer", "byte"
    )
    assert read_index(tmp_path / "out").tokens == 5
    with pytest.raises(UsageError, match="--eot"):
        run(tmp_path / "a.jsonl", "--out", tmp_path / "other", "--eot", "<end>")


def test_an_interruption_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kempner.data.prepare.pipeline.prepare", interrupt)
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path / "a.txt", "--out", tmp_path / "out") == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--out", "x"], ["file"], ["--workers", "0", "file"]])
def test_incomplete_command_lines_are_refused(arguments: list[str]) -> None:
    with pytest.raises(typer.TyperException):
        run(*arguments)
