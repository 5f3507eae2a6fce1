"""A run that learns from pairs of answers: stopped, killed, moved to other worlds; it learns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from random import Random

import pytest
import warm
from harness import KEMPNER, Run, made_once
from test_stop_and_resume import stop_and_kill
from tiny_tokenizers import CHATML, text, write_tokenizer

pytestmark = pytest.mark.timeout(300)

STEPS, BATCH, SEQ_LEN = 30, 8, 96
LONG = f"--train.max_steps={STEPS}"


def kempner(*arguments: str | Path) -> str:
    code, output = warm.complete(*KEMPNER, *arguments)
    assert code == 0, output
    return str(output)


def prepare_pairs(folder: Path) -> None:
    """Answers that differ in their first word, in rows of one to three pairs."""
    tokenizer = write_tokenizer(folder / "tokenizer", "qwen", CHATML)
    draw = Random(3)
    for name, count in (("train", 300), ("held-out", 40)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
            for _ in range(count):
                answers = {
                    key: [{"role": "assistant", "content": f"{word} {text(draw, 4)}"}]
                    for key, word in (("chosen", "Gladly:"), ("rejected", "No,"))
                }
                prompt = [{"role": "user", "content": text(draw, 3)}]
                lines.write(json.dumps({"prompt": prompt, **answers}) + "\n")
        kempner(
            *("prepare", "--preferences", "--tokenizer", tokenizer, "--seq-len", str(SEQ_LEN)),
            *("--out", folder / name, folder / f"{name}.jsonl"),
        )


@pytest.fixture
def pairs(shared: Path) -> Path:
    return made_once(shared / "pairs", prepare_pairs)


def begin(run: Run, base: Run, pairs: Path) -> None:
    """Learn preferences beside the weights of another run."""
    again = ("--step", "0", "--cursor", "0")
    kempner("checkpoint", "import", base.record.path, "--into", run.record.path, *again)
    run.overrides += [
        *(f"--data.dataset_path={pairs / 'train'}", f"--train.seq_len={SEQ_LEN}"),
        *("--adapter.rank=4", "--adapter.dropout=0.1", "--preferences.beta=0.5"),
        *(
            "--model.dropout=0",
            "--optimizer.lr=1e-2",
            "--train.micro_batch_size=1",
            "--checkpoint.in_memory=true",
        ),
        *("--eval.interval=15", f"--eval.dataset_path={pairs / 'held-out'}"),
    ]


def test_a_run_goes_on_bit_for_bit_and_in_other_worlds(
    run: Run, reference: Run, tmp_path: Path, pairs: Path
) -> None:
    """Stopped by a signal, then killed, with two loader workers and with none; then on three ranks
    and on one. Each has several micro batches in a step."""
    vocab_size = json.loads((pairs / "train" / "index.json").read_text())["vocab_size"]
    base = Run(tmp_path / "base", run.data, [f"--model.vocab_size={vocab_size}"])
    base.complete(1, "--train.max_steps=2")
    for one in (run, reference):
        begin(one, base, pairs)
    reference.complete(2, LONG)

    first, second = sorted(random.Random(5).sample(range(2, 25), 2))
    stop_and_kill(run, first, second, LONG, at_first="--data.num_dataloader_workers=2")
    assert pair_numbers(run) == pair_numbers(reference)
    assert run.weights() == reference.weights()

    run.complete(3, f"--train.max_steps={STEPS + 4}", "--data.num_dataloader_workers=2")
    run.complete(1, f"--train.max_steps={STEPS + 8}")
    assert run.taken() == list(range(BATCH * (STEPS + 8)))

    learned = pair_numbers(run)
    assert learned[1][0] == pytest.approx(0.6931472, abs=1e-5), "there is no adapter yet"
    assert all(loss < 0.5 and margin > 0.5 for loss, margin, _ in list(learned.values())[-5:])
    told = kempner("eval", run.record.path)
    accuracy = float(told.partition("accuracy ")[2].partition("%")[0])
    assert accuracy >= 90, told
    held_out = json.loads((pairs / "held-out" / "index.json").read_text())
    assert f"{held_out['documents'] // 2} pairs of" in told
    (status,) = json.loads(kempner("status", run.record.path, "--json"))
    assert status["accuracy"] == learned[STEPS + 8][2]
    assert "DPO" in told_by_card(run, tmp_path)


def told_by_card(run: Run, folder: Path) -> str:
    kempner("checkpoint", "export", run.record.path, "--to-hf", folder / "exported")
    return (folder / "exported" / "README.md").read_text()


def pair_numbers(run: Run) -> dict[int, tuple[float, float, float]]:
    """Loss, margin and accuracy of each step; the last attempt's count."""
    return {
        line["step"]: (line["loss"], line["margin"], line["accuracy"]) for line in run.metrics()
    }


def test_what_preferences_need_and_have_not_is_said_in_a_sentence(
    run: Run, pairs: Path, chats: tuple[str, ...]
) -> None:
    def refused(*overrides: str) -> str:
        code, said = warm.complete(*KEMPNER, "config", "check", run.config, *overrides)
        assert code, said
        assert "Traceback" not in said
        return str(said)

    beta, adapter = "--preferences.beta=0.1", "--adapter.rank=2"
    data = (f"--data.dataset_path={pairs / 'train'}", f"--train.seq_len={SEQ_LEN}")
    assert "preferences.beta needs adapter.rank" in refused(beta, *data)
    assert "holds preferences, of which the loss of a next token" in refused(adapter, *data)
    assert "holds chats, but preferences.beta is set" in refused(beta, adapter, *chats)
    held_out = (chats[0].replace("--data", "--eval"), "--eval.interval=2")
    assert "the training data pairs" in refused(beta, adapter, *data, *held_out)
