"""Trains by transformers' Trainer alone, and under kempner with a stop or a kill in each step.

Prints what differs from the Trainer alone. A kill is an exception that nothing catches: it writes
as little as SIGKILL does.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
from kempner.training.homes import forget_loops

LENGTH, VOCABULARY = 6, 32

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2}
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}

VARIANTS: dict[str, dict[str, Any]] = {
    "intervals": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "logging_steps": 4,
    },
    "epochs": {**EVERY_EPOCH, "load_best_model_at_end": True, "save_total_limit": 1},
    "best": {
        **EVERY_STEP,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    },
    "early": {
        **EVERY_STEP,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "patience": 2,
        "num_train_epochs": 9,
        "learning_rate": 3e-1,
    },
    "early_epochs": {
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
    "max_steps": {**EVERY_EPOCH, "max_steps": 7, "gradient_accumulation_steps": 2},
    "unsaved": {"save_strategy": "no", "logging_strategy": "epoch", "num_train_epochs": 2},
    "by_length": {
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "steps",
        "eval_on_start": True,
        "eval_steps": 4,
        "save_steps": 3,
    },
    "own_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "augmented": {**EVERY_STEP, "save_steps": 3, "gradient_accumulation_steps": 2, "kind": "noisy"},
    "workers": {**EVERY_STEP, "save_steps": 3, "dataloader_num_workers": 2, "kind": "noisy"},
    "stream": {**EVERY_STEP, "save_steps": 3, "max_steps": 12, "kind": "stream"},
}
"""What each sets beside what all have; `patience` is that of an `EarlyStoppingCallback`, and
`kind` that of its data.
"""


class Killed(BaseException):
    """Comes as a kill would."""


class Noting(Trainer):
    """Notes what it trains on, before trouble comes."""

    def __init__(self, *args: Any, trouble: str = "", notes: dict[str, Any], **options: Any):
        super().__init__(*args, **options)
        self.trouble, self.notes = trouble, notes

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        step = self.state.global_step + 1
        loss = super().training_step(model, inputs, *more, **options)
        self.notes.setdefault(f"step {step}", []).append(
            [inputs["input_ids"][:, 0].tolist(), float(loss)]
        )
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


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples whose last tokens are drawn from all generators that there are."""

    def __init__(self, inner: list[dict[str, torch.Tensor]]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self.inner[number]["input_ids"].clone()
        drawn = [random.randrange(VOCABULARY), int(np.random.randint(VOCABULARY))]
        ids[-3:] = torch.tensor([*drawn, int(torch.randint(VOCABULARY, ()))])
        return {"input_ids": ids, "labels": ids}


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, inner: list[dict[str, torch.Tensor]]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.inner)


KINDS = {"plain": list, "noisy": Noisy, "stream": Stream}


def made(variant: str, folder: Path, kind: type[Trainer], **more: Any) -> Any:
    options = dict(VARIANTS[variant])
    patience, data_kind = options.pop("patience", None), options.pop("kind", "plain")
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
    data = {
        "train_dataset": KINDS[data_kind](samples(18)),
        "eval_dataset": samples(7),
    }
    return kind(model, arguments, callbacks=callbacks, **data, **more)


def told(trainer: Any, notes: dict[str, Any]) -> dict[str, Any]:
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
        forget_loops()  # a start is a process of its own
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


def alone(variant: str, folder: Path) -> dict[str, Any]:
    """What the Trainer does without kempner, where that is the same each time."""
    if variant == "workers":
        return disturbed(variant, folder, "none@0")
    notes: dict[str, Any] = {}
    plain = made(variant, folder, Noting, notes=notes)
    plain.train()
    return told(plain, notes)


def troubles(variant: str, steps: int, all_of_them: bool) -> list[str]:
    """A stop and a kill in each step, or in one that is drawn; and no trouble at all."""
    drawn = random.Random(variant)
    found = [
        f"{kind}@{step}"
        for kind in ("stop", "kill")
        for step in (range(1, steps + 1) if all_of_them else [drawn.randint(1, steps - 1)])
    ]
    return ["none@0", *found]


def main(folder: Path, variants: list[str]) -> None:
    """Play these, each step of them; without any all, each with a few."""
    differing = 0
    for variant in variants or VARIANTS:
        expected = alone(variant, folder / "alone")
        shutil.rmtree(folder / "alone")
        for trouble in troubles(variant, expected["steps"], all_of_them=bool(variants)):
            seen = disturbed(variant, folder / "cell", trouble)
            shutil.rmtree(folder / "cell")
            keys = [key for key in expected | seen if expected.get(key) != seen.get(key)]
            for key in keys:
                print(f"{variant}, {trouble}: {key} is {seen.get(key)}, not {expected.get(key)}")
            differing += bool(keys)
    if not differing:
        print("has seen it all")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
