"""Trains by transformers or TRL: hugging_face.py Trainer|SFT|DPO|GRPO|LoRA VARIANT"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import record
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from kempner.integrations.transformers import surviving

EPOCH, BATCH, LENGTH, WORDS = 5, 4, 6, 64

VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {},
    "epochs": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 3,
    },
    "best": {
        "load_best_model_at_end": True,
        "save_steps": 3,
        "save_total_limit": 2,
        "metric_for_best_model": "eval_loss",
    },
    "best_epoch": {
        "load_best_model_at_end": True,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
    },
    "early": {
        "load_best_model_at_end": True,
        "save_steps": 3,
        "max_steps": 40,
    },
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.1},
    },
    "accumulate": {"gradient_accumulation_steps": 2},
    "workers": {"dataloader_num_workers": 2},
    "dropout": {},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1},
    "generations": {"num_iterations": 2},
    "buffered": {  # completions for four steps, in the middle of which a stop may come
        **{"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2},
        **{"per_device_train_batch_size": BATCH // 2 // record.WORLD},
    },
}


class Noting(Trainer):
    """Notes what it trains on and what its evaluations find."""

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        samples = samples_of(inputs)
        loss = super().training_step(model, inputs, *more, **options)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        record.step(self.state.global_step + 1, loss, samples, rates)
        return loss

    def evaluate(self, *more: Any, **options: Any) -> dict[str, float]:
        record.evaluating(self.state.global_step)
        found: dict[str, float] = super().evaluate(*more, **options)
        record.evaluation(self.state.global_step, found["eval_loss"])
        return found


def samples_of(inputs: Any) -> list[int]:
    """The numbers of a batch's samples: each begins with the word of its number."""
    if isinstance(inputs, list):
        return [int(sample["prompt"].split()[0][1:]) for sample in inputs]
    return [int(number) for number in inputs["input_ids"][:, 0]]


def text(samples: int) -> list[str]:
    """Sample i is `wi` and words that follow from it."""
    return [" ".join(f"w{(i + n * n) % WORDS}" for n in range(LENGTH)) for i in range(samples)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w62"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w63", eos_token="w62", padding_side="left"
    )


def network(variant: str) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            num_hidden_layers=1,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            attention_dropout=0.2 if variant == "dropout" else 0.0,
            max_position_embeddings=32,
            pad_token_id=WORDS - 1,
            eos_token_id=WORDS - 2,
            bos_token_id=None,
        )
    )


def settings(kind: str, variant: str) -> dict[str, Any]:
    """For every kind's arguments."""
    return {
        "output_dir": "outputs",
        "max_steps": 14,
        "per_device_train_batch_size": BATCH // record.WORLD,
        "per_device_eval_batch_size": BATCH // record.WORLD,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # or what is left of a gradient after rounding becomes a step
        "save_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "no" if kind == "GRPO" else "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,  # TRL's default, which rounds far more than another number of ranks
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "seed": 3,
        **({"remove_unused_columns": False} if kind == "Trainer" else {}),
        **VARIANTS[variant],
    }


def samples_of_ids() -> Dataset:
    ids = tokenizer()(text(EPOCH * BATCH))["input_ids"]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(variant: str) -> Trainer:
    samples = samples_of_ids()
    callbacks = [EarlyStoppingCallback(2, 10.0)] if variant == "early" else []
    return surviving(Noting)(
        model=network(variant),
        args=TrainingArguments(**settings("Trainer", variant)),
        train_dataset=samples,
        eval_dataset=samples.select(range(8)),
        callbacks=callbacks,
    )


def sft(variant: str) -> Trainer:
    samples = Dataset.from_dict({"text": text(EPOCH * BATCH)})
    return surviving(type("NotingSFT", (Noting, SFTTrainer), {}))(
        model=network(variant),
        args=SFTConfig(max_length=LENGTH, packing=False, **settings("SFT", variant)),
        train_dataset=samples,
        eval_dataset=samples.select(range(8)),
        processing_class=tokenizer(),
    )


def lora(variant: str) -> Trainer:
    samples = samples_of_ids()
    adapted = get_peft_model(network(variant), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return surviving(Noting)(
        model=adapted,
        args=TrainingArguments(**settings("Trainer", variant)),
        train_dataset=samples,
        eval_dataset=samples.select(range(8)),
    )


def dpo(variant: str) -> Trainer:
    words = text(EPOCH * BATCH)
    samples = Dataset.from_dict(
        {"prompt": words, "chosen": words[::-1], "rejected": words[3:] + words[:3]}
    )
    return surviving(type("NotingDPO", (Noting, DPOTrainer), {}))(
        model=(model := network(variant)),
        ref_model=deepcopy(model),
        args=DPOConfig(max_length=3 * LENGTH, **settings("DPO", variant)),
        train_dataset=samples,
        eval_dataset=samples.select(range(8)),
        processing_class=tokenizer(),
    )


def grpo(variant: str) -> Trainer:
    def even(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word[1:]) % 2 == 0 for word in done.split()) / 4 for done in completions]

    return surviving(type("NotingGRPO", (Noting, GRPOTrainer), {}))(
        model=network(variant),
        args=GRPOConfig(max_completion_length=4, num_generations=2, **settings("GRPO", variant)),
        reward_funcs=even,
        train_dataset=Dataset.from_dict({"prompt": text(EPOCH * BATCH)}),
        processing_class=tokenizer(),
    )


KINDS: dict[str, Callable[[str], Trainer]] = {
    "Trainer": trainer,
    "SFT": sft,
    "DPO": dpo,
    "GRPO": grpo,
    "LoRA": lora,
}


def main(kind: str, variant: str) -> None:
    set_seed(3)
    trained = KINDS[kind](variant)
    trained.train()
    state = trained.state
    record.end(state.global_step, trained.model, best=state.best_global_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
