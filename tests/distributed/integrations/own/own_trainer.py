"""Trains by transformers' Trainer or TRL's SFTTrainer, under kempner."""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer
from trouble import note, strike

from kempner.integrations.transformers import surviving

SAMPLES, LENGTH, VOCABULARY = 96, 12, 128


def samples() -> Dataset:
    """Sample i begins with token i, so that a training step can tell which it trains on."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    ids[:, 0] = torch.arange(SAMPLES)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


class Noting(Trainer):
    """Notes what it trains on, before trouble comes."""

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        ids = inputs["input_ids"][:, 0].tolist()
        step = self.state.global_step + 1
        loss = super().training_step(model, inputs, *more, **options)
        note(step, ids, loss.item())
        strike(step)
        return loss


class NotingSFT(Noting, SFTTrainer):
    """The same for TRL."""


def main() -> None:
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=1,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            attention_dropout=0.1,
            max_position_embeddings=LENGTH,
        )
    )
    model.config.pad_token_id = 0
    options: dict[str, Any] = {
        "output_dir": "outputs",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": int(os.environ["ACCUMULATION"]),
        "dataloader_num_workers": int(os.environ["WORKERS"]),
        "learning_rate": 1e-2,
        "save_steps": 5,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    kind: type[Trainer]
    if os.environ["TRAINER"] == "SFTTrainer":
        kind, arguments = NotingSFT, SFTConfig(max_length=LENGTH, packing=False, **options)
        more: dict[str, Any] = {"processing_class": tokenizer()}
    else:
        kind, arguments, more = Noting, TrainingArguments(**options), {}
    trainer = surviving(kind)(model=model, args=arguments, train_dataset=samples(), **more)
    trainer.train()
    torch.save(trainer.model.state_dict(), f"final-{os.environ.get('RANK', '0')}.pt")


def tokenizer() -> Any:
    """One that TRL is content with; the samples are token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


if __name__ == "__main__":
    main()
