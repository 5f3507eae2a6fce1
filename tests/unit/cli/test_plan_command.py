"""`kempner plan`: what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kempner.cli.entry import main

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]
CONFIG = """
[model]
dim = 64
n_layers = 3
n_heads = 4
vocab_size = 1000
[train]
seq_len = 64
global_batch_size = 16
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    return path


def run(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["plan", *(str(argument) for argument in arguments)])
    return left.value.code


def test_what_is_traced_and_what_is_assumed_is_said(config: Path, capsys: Captured) -> None:
    assert run(config, "--world", 4, "--nodes", 2, "--network-gbps", 123) == 0
    said = capsys.readouterr().out
    assert "4 ranks on 2 nodes, one H100 each: replicate 1 x shard 4 x tensor 1" in said
    assert "FLOPs and bytes sent equal those of the formulas" in said
    assert "123 Gb/s from a node to others" in said
    assert "NVIDIA H100 data sheet" in said
    assert "(Young's formula)" in said
    assert said.splitlines()[-1].startswith("fits: ")


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(ROOT)
    block = (ROOT / "docs/plan.md").read_text().split("```console\n")[1].split("```")[0]
    command, _, shown = block.partition("\n")
    assert run(*command.removeprefix("$ kempner plan ").split()) == 0
    assert capsys.readouterr().out == shown


def test_json_has_the_numbers(config: Path, capsys: Captured) -> None:
    assert run(config, "--world", 2, "--gpu", "a100", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True
    assert told["job"]["gpu"]["name"] == "A100-80GB"
    memory = told["room"]["memory"]
    assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total")
    # Weights and two moments in float32, and a counter of steps for each parameter.
    parameters = 2 * 1000 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64
    assert 0 <= told["saves"]["bytes"] - 12 * parameters < 1000
    sent = {e["collective"]["operation"]: e["buffers"] for e in told["exchanges"]}
    assert sent.keys() == {"all_gather", "reduce_scatter"}
    assert sum(sent.values()) == told["sent"]["traced"]
    spent = told["speed"]["time"]
    assert spent["total"] == pytest.approx(sum(v for k, v in spent.items() if k in _PARTS))


_PARTS = ("compute", "memory", "within_node", "between_nodes")


def test_what_does_not_fit_ends_with_1_and_says_what_to_change(
    config: Path, capsys: Captured
) -> None:
    large = ["--train.seq_len=4096", "--train.micro_batch_size=1024", "--train.loss_chunk=0"]
    assert run(config, "--world", 2, "--train.global_batch_size=2048", *large) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: ")
    assert last.endswith("set train.loss_chunk=1024")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--world", 7, "--nodes", 2], "7 ranks are not equally many on each of 2 nodes"),
        (["--world", 2, "--gpu", "H1000"], "did you mean H100?"),
        (["--world", 3, "--parallelism.tensor_parallel_degree=2"], "does not divide the 3 ranks"),
        (
            ["--world", 4, "--nodes", 4, "--parallelism.tensor_parallel_degree=2"],
            "puts the ranks 0 to 1 on node 0 and node 1",
        ),
        ([], "--world"),
    ],
)
def test_what_cannot_be_is_refused(
    config: Path, capsys: Captured, arguments: list[object], sentence: str
) -> None:
    assert run(config, *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_vocabulary_the_data_is_asked(config: Path, capsys: Captured) -> None:
    config.write_text(CONFIG.replace("vocab_size = 1000", ""))
    assert run(config, "--world", 2, "--data.dataset_path=/nowhere") == 65
    assert "or set model.vocab_size" in capsys.readouterr().err


def test_the_masks_of_chats_are_counted(
    config: Path, capsys: Captured, chats: tuple[str, ...]
) -> None:
    assert run(config, "--world", 2) == 0
    assert "document masks" not in capsys.readouterr().out
    config.write_text(CONFIG.replace("vocab_size = 1000", ""))
    assert run(config, "--world", 2, *chats) == 0
    assert "of document masks it is traced what they take" in capsys.readouterr().out


def test_a_model_of_the_user_s_own_is_not_known(config: Path, capsys: Captured) -> None:
    config.write_text('[model]\nfactory = "own:build"\nvocab_size = 10\n')
    assert run(config, "--world", 2) == 2
    assert "kempner plan knows kempner's own models only" in capsys.readouterr().err
