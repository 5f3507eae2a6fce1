"""transformers' Trainer: enable_jit_checkpoint saves at SIGTERM; resumed from its last checkpoint.

Resuming as the pages on the Trainer have it: `get_last_checkpoint`, passed over where the folder
says that it is incomplete, as the page on just-in-time checkpoints asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import task
import torch
from shape import BATCH, EPOCHS, EVALUATE_EVERY, SAMPLES, SAVE_EVERY
from task import ACCUMULATION, UNDER_KEMPNER
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

OUTPUTS = task.FOLDER / "outputs"


class Curve(PreTrainedModel):
    """The task's model, as the Trainer wants models."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = task.curve()

    def forward(self, x: Tensor, indices: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": task.loss_of(self.layers, x)}


class Noting(Trainer):
    """Notes what it trains on."""

    def training_step(self, model: nn.Module, inputs: Any, *more: Any, **options: Any) -> Tensor:
        step, indices = self.state.global_step + 1, inputs["indices"].tolist()
        loss = super().training_step(model, inputs, *more, **options)
        task.note(step, indices, loss.item())
        return loss

    def prediction_step(self, *more: Any, **options: Any) -> Any:
        task.evaluating(self.state.global_step)
        return super().prediction_step(*more, **options)


def together(rows: list[tuple[int, Tensor]]) -> dict[str, Tensor]:
    indices, xs = zip(*rows, strict=True)
    return {"indices": torch.tensor(indices), "x": torch.stack(xs)}


def last_complete() -> str | None:
    """The newest checkpoint that does not say that it is incomplete."""
    found = get_last_checkpoint(str(OUTPUTS)) if OUTPUTS.is_dir() else None
    while found and Path(found, "checkpoint-is-incomplete.txt").exists():
        Path(found).rename(OUTPUTS / f"incomplete-{Path(found).name}")
        found = get_last_checkpoint(str(OUTPUTS))
    return found


def main() -> None:
    set_seed(1)
    arguments = TrainingArguments(
        str(OUTPUTS),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=SAMPLES,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_num_workers=task.WORKERS,
        learning_rate=1e-2,
        save_steps=SAVE_EVERY,
        eval_strategy="steps",
        eval_steps=EVALUATE_EVERY,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        enable_jit_checkpoint=not UNDER_KEMPNER,
    )
    kind: type[Trainer] = Noting
    if UNDER_KEMPNER:
        from kempner.integrations.transformers import surviving

        kind = surviving(Noting)
    trainer = kind(
        model=Curve(PretrainedConfig()),
        args=arguments,
        train_dataset=task.Points(),
        eval_dataset=task.Points(),
        data_collator=together,
    )
    trainer.train(resume_from_checkpoint=None if UNDER_KEMPNER else last_complete())
    if trainer.state.global_step >= trainer.state.max_steps:
        task.finish(trainer.model)


if __name__ == "__main__":
    main()
