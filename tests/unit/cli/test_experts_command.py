"""`kempner plan MODEL`: what a mixture of experts needs of a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kempner.cli.entry import main
from kempner.training.plan.experts import ExpertModel, divide_experts

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]

MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 62,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "tie_word_embeddings": False,
}
"""https://huggingface.co/MiniMaxAI/MiniMax-M2: 229 billion parameters."""

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 512,
}
"""A small one, in which the first layer has no experts, and the others have one that is shared."""

OWN_CODE: dict[str, object] = {
    "model_type": "no_such_type",
    "num_experts": 4,
    "auto_map": {"AutoConfig": "its_code.Config", "AutoModelForCausalLM": "its_code.Model"},
}


def run(folder: Path, content: dict[str, object] | str, *arguments: object) -> int | str | None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["plan", str(folder), *(str(argument) for argument in arguments)])
    return left.value.code


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: Captured) -> None:
    page = (ROOT / "docs/plan.md").read_text()
    shown = page.split("$ kempner plan MiniMax-M2 --world 64\n")[1].split("```")[0]
    assert run(tmp_path, MINIMAX_M2, "--world", 64) == 0
    assert capsys.readouterr().out == shown


def test_shared_experts_and_layers_without_are_not_divided(
    tmp_path: Path, capsys: Captured
) -> None:
    assert run(tmp_path, DEEPSEEK, "--world", 8, "--gpu", "a100-40gb", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["expert_parameters"] == 3 * 16 * (3 * 64 * 32)
    assert [way["expert_parallel"] for way in told["ways"]] == [1, 2, 4, 8]
    assert told["ways"][-1]["experts"] == 2
    assert told["ways"][0]["fits"] == {"weights": True, "sharded": True, "whole": True}


def test_the_degrees_divide_the_experts_and_the_ranks() -> None:
    model = ExpertModel(experts=12, layers=2, expert_parameters=1200, other_parameters=100)
    ways = divide_experts(model, world=8)
    assert [(way.expert_parallel, way.experts) for way in ways] == [(1, 12), (2, 6), (4, 3)]
    assert [way.weights for way in ways] == [2 * 1300, 2 * 700, 2 * 400]
    assert [way.whole for way in ways] == [16 * 1300, 16 * 700, 16 * 400]
    # Of the state each rank has an eighth; of the weights of two layers, which are all, its part.
    assert [way.sharded for way in ways] == [16 * 163 + 2 * 1300, 16 * 163 + 1400, 16 * 163 + 800]


@pytest.mark.parametrize(
    ("content", "arguments", "code", "said"),
    [
        ({"model_type": "llama"}, (), 2, "describes no mixture of experts"),
        ("[]", (), 2, "describes no mixture of experts"),
        ("{", (), 2, "is not JSON"),
        ({"model_type": "no_such_type", "num_experts": 4}, (), 2, "transformers does not know"),
        (OWN_CODE, (), 2, "transformers does not know"),  # without a question whether to run it
        (MINIMAX_M2, ("--gpu", "H1"), 2, "no figures are known of the GPU H1"),
    ],
)
def test_what_cannot_be_counted_is_said_in_a_sentence(
    tmp_path: Path,
    capsys: Captured,
    content: dict[str, object] | str,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert run(tmp_path, content, "--world", 8, *arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1]


def test_one_gpu_is_not_enough(tmp_path: Path) -> None:
    assert run(tmp_path, MINIMAX_M2, "--world", 1) == 1
