"""Runs that learn from chats: the losses of TRL's trainer, and answers that are right."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import warm
from harness import KEMPNER, Run
from tiny_tokenizers import Record, chat_of_half_a_row, template_of_trl, write_tokenizer

from kempner.data.files.chat_template import ChatTemplate
from kempner.data.order.batch_slices import Slicing
from kempner.data.prepare.chats import documents_of, read_chat
from kempner.data.prepare.pipeline import prepare
from kempner.data.serve.loader import Feed

STEPS, ROWS, SEQ_LEN = 10, 4, 128
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def kempner(*arguments: str | Path) -> str:
    code, output = warm.complete(*KEMPNER, *arguments)
    assert code == 0, output
    return str(output)


def in_order(data: Path, records: Sequence[Record], template: ChatTemplate) -> list[list[Record]]:
    """The chats of each of the first steps of a run."""
    known = {tuple(documents_of(read_chat(each), template)[0].ids): each for each in records}
    slicing = Slicing(ROWS, ROWS)
    found: list[list[Record]] = []
    with closing(Feed(data, slicing, seq_len=SEQ_LEN, seed=0)) as feed:
        for _ in range(STEPS):
            step = feed.take()
            assert step is not None
            (micro,) = step.micro
            assert micro.documents is not None
            rows = zip(micro.inputs, micro.documents, strict=True)
            parts = [tuple(row[n == of].tolist()) for row, of in rows for n in of.unique()]
            found.append([known[part] for part in parts if part in known])
    return found


def losses_of_trl(model: Path, chats: Sequence[Record], in_a_step: int) -> list[float]:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*arguments, **options)
            losses.append(loss.item())
            return loss

    arguments = SFTConfig(
        str(model / "out"),
        **{"max_length": SEQ_LEN, "assistant_only_loss": True, "use_cpu": True, "bf16": False},
        **{"per_device_train_batch_size": in_a_step, "max_steps": STEPS, "save_strategy": "no"},
        **{"learning_rate": 1e-3, "lr_scheduler_type": "constant", "adam_beta2": 0.95},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": [], "disable_tqdm": True},
        **{"gradient_checkpointing": False, "dataloader_pin_memory": False},
    )
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(list(chats)),
        processing_class=AutoTokenizer.from_pretrained(model),
    ).train()
    return losses


@pytest.mark.timeout(300)
def test_the_first_losses_are_those_of_trl(tmp_path: Path) -> None:
    """From the same weights of Hugging Face, with the same chats in each step; here they are packed
    and on two ranks, there they are rows of a padded batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_tokenizer(tmp_path / "model", "llama3", template_of_trl("llama3_training"))
    template = ChatTemplate.beside(folder)
    draw = Random(8)
    records = [chat_of_half_a_row(draw, template, SEQ_LEN) for _ in range(2 * ROWS * STEPS)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "chats.jsonl").write_text(lines, encoding="utf-8")
    data = tmp_path / "data"
    index = prepare(
        data, [tmp_path / "chats.jsonl"], tokenizer=str(folder), kind="chats", seq_len=SEQ_LEN
    ).index
    torch.manual_seed(1)
    sizes = {**SIZES, **HEADS, "vocab_size": index.vocab_size, "initializer_range": 0.1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    run = Run(tmp_path / "run", data)
    told = kempner("checkpoint", "import", "--from-hf", folder, "--into", run.record.path)
    model = re.findall(r"^(\w+) = (.+)$", told.partition("[model]")[2], re.MULTILINE)
    run.complete(
        2,
        *(f"--model.{key}={value}" for key, value in model),
        *(
            "--model.n_heads=4",
            "--model.dropout=0",
            f"--train.seq_len={SEQ_LEN}",
            f"--train.max_steps={STEPS}",
        ),
        *(f"--train.global_batch_size={ROWS}", "--train.micro_batch_size=1", "--optimizer.lr=1e-3"),
        *("--optimizer.betas=[0.9, 0.95]", "--optimizer.weight_decay=0", "--train.dtype=float32"),
        *("--scheduler.name=constant", "--scheduler.warmup_steps=0"),
    )
    steps = in_order(data, records, template)
    assert [len(step) for step in steps] == [2 * ROWS] * STEPS
    expected = losses_of_trl(folder, [each for step in steps for each in step], 2 * ROWS)
    ours = [loss for loss, *_ in run.steps().values()]
    assert ours == pytest.approx(expected, rel=1e-4)
    assert ours[-1] < ours[0] - 0.1


@pytest.mark.timeout(300)
def test_the_example_project_learns_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of its own README."""
    project = tmp_path / "sft"
    kempner("init", "--sft", project)
    monkeypatch.chdir(project)
    typed = re.findall(r"`kempner (.+?)`", (project / "README.md").read_text())
    commands = [shlex.split(each) for each in typed]
    prepare_it, check, train, ask = commands[:4]
    kempner(*prepare_it)
    small = ["--train.max_steps=120", "--model.n_layers=2", "--train.threads=1"]
    kempner(*check, *small)
    kempner(*train, *small)
    assert kempner(*ask).splitlines()[-1] == "Lima."
    for country, capital in {"Nepal": "Kathmandu.", "Egypt": "Cairo."}.items():
        question = f"What is the capital of {country}?"
        told = kempner("sample", "runs/train", "--chat", question, "--temperature", "0")
        assert told.splitlines()[-1] == capital
    kempner("checkpoint", "export", "runs/train", "--to-hf", "exported")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("exported")
    model = AutoModelForCausalLM.from_pretrained("exported")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Peru?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    said = model.generate(**asked, do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(said[0]).endswith("assistant\nLima.<|im_end|>")
