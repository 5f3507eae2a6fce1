"""Hugging Face's library opens an export, and computes and writes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from text_run import SEQ_LEN, make_text_run, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kempner.checkpoint.format.manifest import read
from kempner.cli.checkpoint import trained_on
from kempner.cli.entry import main
from kempner.data.files.text import TextTokenizer

Captured = pytest.CaptureFixture[str]

PROMPTS = ["the cat", "Übrigens: é€ \n\n x . y , z n't  ", " \x00\x07\r\n\t"]


def kempner(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    return left.value.code


@pytest.fixture(params=["byte", "huggingface"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    given = "byte" if request.param == "byte" else make_tokenizer(tmp_path / "some.json")
    return make_text_run(tmp_path, given)


def test_the_same_ids_logits_and_text(run: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "exports" / "deep" / "new"
    assert kempner("checkpoint", "export", run, "--out", out) == 0
    theirs: Any = AutoModelForCausalLM.from_pretrained(out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    own = TextTokenizer.of(tmp_path / "data")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == own.eot
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == own.eot
    assert (theirs.config.max_position_embeddings, tokenizer.model_max_length) == (SEQ_LEN, SEQ_LEN)

    checkpoint = run / "checkpoints" / "step-00000040"
    manifest = read(checkpoint)
    text = trained_on.find_text(run, checkpoint, manifest, None)
    shape = trained_on.recorded_shape(checkpoint, manifest, text.seq_len)
    ours = trained_on.load_model(checkpoint, manifest, shape, text.dtype, torch.device("cpu"))
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert ids[0].tolist() == own.encode(prompt)
        assert tokenizer.decode(ids[0]) == prompt
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=2e-4, rtol=1e-4)

    ids = tokenizer("the cat", return_tensors="pt")
    written = theirs.generate(**ids, do_sample=False, max_new_tokens=30)
    expected = tokenizer.decode(written[0], skip_special_tokens=True)
    capsys.readouterr()
    arguments = ("--prompt", "the cat", "--temperature=0", "--max-tokens=30")
    assert kempner("sample", run, *arguments) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert len(expected) > len("the cat") + 5


def test_without_its_data_the_weights_are_exported_all_the_same(
    tmp_path: Path, capsys: Captured
) -> None:
    """And no end of a document is named: the reader would take the default, some other token."""
    run = make_text_run(tmp_path)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert kempner("checkpoint", "export", run, "--out", tmp_path / "bare") == 0
    said = capsys.readouterr().err
    assert (
        f"{tmp_path}/bare has no tokenizer: the data of this run, {tmp_path}/data, is not" in said
    )
    assert said.count("\n") == 1
    assert sorted(p.name for p in (tmp_path / "bare").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["eos_token_id"] is None
    where = ("--data", tmp_path / "moved")
    assert kempner("checkpoint", "export", run, "--out", tmp_path / "whole", *where) == 0
    assert (tmp_path / "whole" / "tokenizer.json").exists()
