"""PEFT opens the export of an adapter, transformers the merged one, and both write the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from saved import commit_state
from text_run import make_text_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from kempner.checkpoint.format.manifest import Base, data_digest, read
from kempner.cli.entry import main
from kempner.model.spec.adapter import Adapter
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]

ADAPTER = Adapter(rank=3, alpha=5.0, targets=("q_proj", "o_proj", "down_proj"), rslora=True)
WIDTHS = {"attention.wq": (32, 32), "attention.wo": (32, 32), "ffn.w2": (48, 32)}


def kempner(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    return left.value.code


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Whose last commit, of step 50, is an adapter beside the weights of step 40."""
    path = make_text_run(tmp_path)
    base = read(path / "checkpoints" / "step-00000040")
    generator = torch.Generator().manual_seed(2)
    state = {}
    for block in range(2):
        for layer, (inputs, outputs) in WIDTHS.items():
            name = f"model.layers.{block}.{layer}"
            state[f"{name}.lora_A"] = torch.randn(3, inputs, generator=generator) / 4
            state[f"{name}.lora_B"] = torch.randn(outputs, 3, generator=generator) / 4
    commit_state(
        RunDirectory(path),
        state,
        50,
        world=2,
        model=base.identity.model,
        adapter=ADAPTER.fixed(),
        base=Base(40, data_digest(base)),
    )
    return path


def test_peft_and_transformers_write_what_sample_does(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    base, pairs, merged = (tmp_path / name for name in ("base", "pairs", "merged"))
    export = ("checkpoint", "export", run)
    assert kempner(*export, "--step", 40, "--to-hf", base) == 0
    assert kempner(*export, "--to-hf", pairs, "--base", base) == 0
    assert kempner(*export, "--to-hf", merged, "--merge") == 0
    capsys.readouterr()
    texts = []
    for step in (50, 40):
        asked = ("--step", step, "--prompt", "the cat", "--temperature=0", "--max-tokens=30")
        assert kempner("sample", run, *asked) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    logits = []
    opened: dict[Path, Any] = {pairs: AutoPeftModelForCausalLM, merged: AutoModelForCausalLM}
    for folder, kind in opened.items():
        model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("the cat", return_tensors="pt")
        written = model.generate(**ids, do_sample=False, max_new_tokens=30)
        assert tokenizer.decode(written[0], skip_special_tokens=True) + "\n" == texts[0]
        with torch.no_grad():
            logits.append(model(**ids).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    assert kempner("compare", run, merged) == 0
    assert kempner("compare", run, base) == 1


def test_what_is_asked_for_in_vain_is_refused(run: Path, tmp_path: Path, capsys: Captured) -> None:
    export = ("checkpoint", "export", run, "--out", tmp_path / "out")
    assert kempner(*export, "--step", 40, "--merge") == 2
    assert kempner(*export, "--merge", "--format", "torch") == 2
    assert kempner(*export, "--merge", "--base", "some/model") == 2
    assert kempner("checkpoint", "import", run, "--into", tmp_path / "next") == 2
    refused = capsys.readouterr().err
    assert "--merge has no effect: step-00000040 holds a whole model" in refused
    assert "--merge has no effect with --format torch" in refused
    assert "--base has no effect with --merge" in refused
    assert "step-00000050 holds an adapter, and not the weights beside it" in refused


def test_the_weights_beside_which_it_was_trained_are_kept_and_missed(
    run: Path, capsys: Captured
) -> None:
    folder = run / "checkpoints"
    assert kempner("checkpoint", "prune", run, "--keep-last", 1) == 0
    assert "stays     step-00000040" in capsys.readouterr().out
    assert kempner("checkpoint", "verify", run) == 0
    (folder / "step-00000040").rename(folder / "elsewhere")
    for command in (("checkpoint", "verify", run), ("sample", run, "--prompt", "a")):
        assert kempner(*command) == 65
        told = capsys.readouterr()
        said = "the weights beside which the adapter was trained are gone"
        assert (told.out + told.err).count(said) == 1
    (folder / "step-00000050").rename(folder / "step-00000040")
    (folder / "elsewhere").rename(folder / "step-00000050")
    assert kempner("sample", run, "--step", 40, "--prompt", "a") == 65
    assert "step-00000040 does not have the weights beside which" in capsys.readouterr().err
