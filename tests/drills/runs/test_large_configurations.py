"""Configurations for many GPUs, cut to two layers, on eight ranks and then on four."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from drilling import SEED, note
from harness import KEMPNER, ROOT, Run
from tiny_tokenizers import forms, template_of_trl, write_tokenizer
from warm import complete

pytestmark = [pytest.mark.timeout(1200), pytest.mark.drill]

STEPS, ROWS, SEQ_LEN = 18, 32, 128

FEWER = (
    *("--model.n_layers=2", "--model.dim=64", "--model.n_heads=16", "--model.vocab_size=512"),
    *("--model.ffn_dim=128", f"--train.max_steps={STEPS}", f"--train.global_batch_size={ROWS}"),
    *(f"--train.seq_len={SEQ_LEN}", "--scheduler.warmup_steps=4", "--train.log_samples=true"),
    *("--checkpoint.interval=5", "--optimizer.lr=1e-3", "--train.threads=1", "--run.name=run"),
)
"""What makes them small. Heads of keys and values, their norms, scaled positions, the
recomputation, loader workers and micro batches stay as they are; the type is that of a CPU."""

CONFIGURATIONS = {
    "32b-sft": ("qwen", "qwen3", ("--model.head_dim=8",), (), ()),
    "70b-sft": (
        *("llama3", "llama3", ()),
        ("--parallelism.tensor_parallel_degree=4",),
        ("--parallelism.tensor_parallel_degree=2",),
    ),
}
"""Tokenizer, template, more of what makes it small, and the tensor groups of 8 and of 4 ranks."""


def prepare(folder: Path, family: str, template: str) -> Path:
    """Chats with the tokens and the template of a real model."""
    tokenizer = write_tokenizer(folder / "tokenizer", family, template_of_trl(template))
    records = [each for rows in forms(random.Random(SEED), 60).values() for each in rows]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    command = ["prepare", "--chats", "--tokenizer", tokenizer, "--seq-len", str(SEQ_LEN)]
    code, said = complete(*KEMPNER, *command, "--out", folder / "data", folder / "chats.jsonl")
    assert code == 0, said
    return folder / "data"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stopped_on_eight_ranks_and_resumed_on_four(
    name: str, run: Run, reference: Run, tmp_path: Path
) -> None:
    """On eight a stop changes no bit; on four every loss is the same but for rounding, and each
    step has the samples that it has on eight."""
    family, template, more, eight, four = CONFIGURATIONS[name]
    data = f"--data.dataset_path={prepare(tmp_path, family, template)}"
    for one in (run, reference):
        one.config.write_text((ROOT / f"configs/train/{name}.toml").read_text())
        one.overrides += [*FEWER, *more, data, f"--run.dir={one.folder / 'runs'}"]
    reference.complete(8, *eight, deadline=300)
    stopped = []
    for step in (3, 8):
        job = run.supervise(8, *eight)
        run.reach(step, job)
        job.signal()
        assert job.wait(300) == 75, job.output()
        stopped.append(run.latest())
    on_eight = run.steps()
    run.complete(4, *four, deadline=300)
    expected, found = reference.steps(), run.steps()
    assert {step: found[step] for step in on_eight} == {s: expected[s] for s in on_eight}
    assert 3 <= stopped[0] < stopped[1] == max(on_eight) < STEPS
    off = {s: abs(found[s][0] / expected[s][0] - 1) for s in expected if s not in on_eight}
    assert max(off.values()) < 1e-5
    assert found[STEPS][0] < found[1][0]
    for one in (run, reference):
        taken = {step: sorted(ids) for step, ids in one.samples().items()}
        assert taken == {s: [*range(ROWS * (s - 1), ROWS * s)] for s in range(1, STEPS + 1)}
    note(
        "large configuration, cut",
        configuration=name,
        steps_with_8_ranks=stopped[-1],
        steps_with_4_ranks=STEPS - stopped[-1],
        bits_changed_by_stops=0,
        largest_difference_of_a_loss=f"{max(off.values()):.1e}",
    )
