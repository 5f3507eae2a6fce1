"""`kempner sample`: what it prints, and what it says where it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from saved import commit_state, small_state
from text_run import SEQ_LEN, make_text_run, make_tokenizer

from kempner.cli.checkpoint.trained_on import _harmless
from kempner.cli.entry import main
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]


def sample(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["sample", *map(str, arguments)])
    return left.value.code


def test_the_same_seed_gives_the_same_text(tmp_path: Path, capsys: Captured) -> None:
    run, said = make_text_run(tmp_path), []
    for seed in (1, 1, 2):
        options = (f"--seed={seed}", "--max-tokens=20", "--temperature=5", "--top-k=0")
        assert sample(run, "--prompt", "Übrigens", *options) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert all(text.startswith("Übrigens") and text.endswith("\n") for text in said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt="], "--prompt= has no value"),
        (["--prompt", "x" * (SEQ_LEN + 1)], f"has {SEQ_LEN + 1} tokens, and the model was trained"),
        (["--prompt=x", "--step=41"], "step 41 is not committed"),
        (["--prompt=x", "--temperature=inf"], "--temperature inf is not"),
        (["--prompt=\udcff"], "--prompt is not valid UTF-8"),
    ],
)
def test_what_cannot_be_asked_for(
    tmp_path: Path, options: list[str], words: str, capsys: Captured
) -> None:
    assert sample(make_text_run(tmp_path), *options) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_run_without_a_checkpoint_yet(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    assert sample(tmp_path, "--prompt=x") == 2
    assert f"{tmp_path} has no checkpoint in {tmp_path}/checkpoints yet" in capsys.readouterr().err


def test_a_model_that_kempner_does_not_know(tmp_path: Path, capsys: Captured) -> None:
    commit_state(RunDirectory(tmp_path), small_state(), 10)
    assert sample(tmp_path, "--prompt=x") == 65
    assert "step-00000010 does not say what its model is like" in capsys.readouterr().err


def test_data_without_its_tokenizer(tmp_path: Path, capsys: Captured) -> None:
    run = make_text_run(tmp_path, make_tokenizer(tmp_path / "some.json"))
    (tmp_path / "data" / "tokenizer.json").unlink()
    assert sample(run, "--prompt=x") == 65
    assert f"{tmp_path}/data keeps no tokenizer.json" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "data")
    assert sample(run, "--prompt=x") == 65
    assert f"the data of this run, {tmp_path}/data, is not there" in capsys.readouterr().err


def test_a_vocabulary_that_is_not_the_model_s(tmp_path: Path, capsys: Captured) -> None:
    run = make_text_run(tmp_path, vocab_size=200)
    assert sample(run, "--prompt=x") == 65
    assert "has 257 token ids, the model of step-00000040 200" in capsys.readouterr().err


def test_a_damaged_checkpoint(tmp_path: Path, capsys: Captured) -> None:
    run = make_text_run(tmp_path)
    file = run / "checkpoints" / "step-00000040" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert sample(run, "--prompt=x") == 65
    assert "__1_0.distcp: block 0 (from byte 0) does not match" in capsys.readouterr().err


def test_what_steers_a_terminal_is_not_sent_to_it() -> None:
    assert _harmless("a\x1b[2J\r\n\té\u202e") == "a\ufffd[2J\ufffd\n\té\ufffd"
