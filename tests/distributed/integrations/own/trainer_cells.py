"""Trains by transformers' Trainer alone, and under kempner with a stop or a kill in each step.

Prints a line of JSON for each cell: what differs from the Trainer alone. A kill is an exception
that nothing catches: it writes as little as SIGKILL does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from kempner.integrations.transformers import surviving

LENGTH, VOCABULARY = 6, 32

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2}
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}

VARIANTS: dict[str, dict[str, Any]] = {
    "evaluates every third step, saves every second, logs every fourth": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "logging_steps": 4,
    },
    "best of the epochs": {**EVERY_EPOCH, "load_best_model_at_end": True, "save_total_limit": 1},
    "saves the best": {
        **EVERY_STEP,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    },
    "stops early": {
        **EVERY_STEP,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "patience": 2,
        "num_train_epochs": 9,
        "learning_rate": 3e-1,
    },
    "stops early by epochs": {
        **EVERY_EPOCH,
        "load_best_model_at_end": True,
        "patience": 1,
        "num_train_epochs": 9,
        "learning_rate": 3e-1,
    },
    "plateau": {
        **EVERY_STEP,
        "save_steps": 3,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.2},
    },
    "ends within an epoch": {**EVERY_EPOCH, "max_steps": 7, "gradient_accumulation_steps": 2},
    "saves nothing": {"save_strategy": "no", "logging_strategy": "epoch", "num_train_epochs": 2},
    "other order of samples": {
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "steps",
        "eval_on_start": True,
        "eval_steps": 4,
        "save_steps": 3,
    },
    "sampler of the library": {"accelerator_config": {"use_seedable_sampler": False}},
}
"""What each sets beside what all have; `patience` is that of an `EarlyStoppingCallback`."""


class Killed(BaseException):
    """Comes as a kill would."""


class Noting(Trainer):
    """Notes what it trains on, before trouble comes."""

    def __init__(self, *args: Any, trouble: str = "", notes: dict[int, Any], **options: Any):
        super().__init__(*args, **options)
        self.trouble, self.notes = trouble, notes

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        step = self.state.global_step + 1
        loss = super().training_step(model, inputs, *more, **options)
        at = round(self.state.epoch * 1000), step
        self.notes.setdefault(str(at), []).append([inputs["input_ids"][:, 0].tolist(), float(loss)])
        kind, _, when = self.trouble.partition("@")
        if when == str(step):
            if kind == "kill":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        return loss


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    """Sample i begins with token i, and is the longer the greater i is."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (number, LENGTH), generator=generator)
    ids[:, 0] = torch.arange(number)
    return [{"input_ids": row, "labels": row} for row in ids]


def made(variant: str, folder: Path, kind: type[Trainer], **more: Any) -> Any:
    options = dict(VARIANTS[variant])
    patience = options.pop("patience", None)
    callbacks = [] if patience is None else [EarlyStoppingCallback(patience)]
    common: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    set_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=1,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            attention_dropout=0.2,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(str(folder / "outputs"), **common | options)
    data = {"train_dataset": samples(18), "eval_dataset": samples(7)}
    return kind(model, arguments, callbacks=callbacks, **data, **more)


def told(trainer: Any, notes: dict[int, Any]) -> dict[str, Any]:
    """All that is to be the same."""
    history = [
        {key: value for key, value in line.items() if not key.endswith(("runtime", "_second"))}
        for line in trainer.state.log_history
    ]
    digest = hashlib.sha256()
    for weight in trainer.model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return {
        "history": history,
        "steps": trainer.state.global_step,
        "best": Path(trainer.state.best_model_checkpoint or "none").name,
        "weights": digest.hexdigest(),
        "rate": trainer.optimizer.param_groups[0]["lr"],
        **notes,
    }


def disturbed(variant: str, folder: Path, trouble: str) -> dict[str, Any]:
    """Under kempner, with trouble in the first start; without any, started again when complete."""
    kind = type("Here", (surviving(Noting),), {"run_dir": folder / "run"})
    notes: dict[str, Any] = {}
    for _ in range(3):
        mine: dict[str, Any] = {}
        trainer = made(variant, folder, kind, trouble=trouble, notes=mine)
        try:
            trainer.train()
        except (SystemExit, Killed):
            trouble = ""
            continue
        finally:
            notes |= mine
        seen = told(trainer, notes)
        if trouble == "":
            return seen
        trouble = ""
    raise AssertionError("it does not end")


def main(folder: Path) -> None:
    for variant in VARIANTS:
        notes: dict[str, Any] = {}
        plain = made(variant, folder / "alone", Noting, notes=notes)
        plain.train()
        alone = told(plain, notes)
        shutil.rmtree(folder / "alone")
        troubles = [
            f"{kind}@{step}" for kind in ("stop", "kill") for step in range(1, 1 + alone["steps"])
        ]
        for trouble in ["none@0", *troubles]:
            seen = disturbed(variant, folder / "cell", trouble)
            shutil.rmtree(folder / "cell")
            wrong = {
                key: [alone.get(key), seen.get(key)]
                for key in sorted(alone | seen, key=str)
                if alone.get(key) != seen.get(key)
            }
            print(json.dumps({"variant": variant, "trouble": trouble, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
