"""The programs of the matrix."""

from __future__ import annotations

from dataclasses import dataclass

from matrix.cells import Program

HUGGING_FACE = (
    Program("hugging_face.py", "Trainer", "steps"),
    Program("hugging_face.py", "Trainer", "epochs", 15, save_every=5, evaluate_every=5),
    Program("hugging_face.py", "Trainer", "best", save_every=3),
    Program("hugging_face.py", "Trainer", "best_epoch", save_every=5, evaluate_every=5),
    Program("hugging_face.py", "Trainer", "early", 9, save_every=3),
    Program("hugging_face.py", "Trainer", "plateau"),
    Program("hugging_face.py", "Trainer", "accumulate", epoch=3, micro=2),
    Program("hugging_face.py", "Trainer", "workers"),
    Program("hugging_face.py", "Trainer", "dropout", worlds=False),
    Program("hugging_face.py", "Trainer", "cosine"),
    Program("hugging_face.py", "SFT", "steps"),
    Program("hugging_face.py", "SFT", "best", save_every=3),
    Program("hugging_face.py", "LoRA", "steps"),
    Program("hugging_face.py", "LoRA", "best", save_every=3),
    Program("hugging_face.py", "DPO", "steps"),
    Program("hugging_face.py", "DPO", "accumulate", epoch=3, micro=2),
    Program("hugging_face.py", "GRPO", "generations", evaluate_every=0, epoch=0, worlds=False),
    Program("hugging_face.py", "GRPO", "steps", evaluate_every=0, epoch=0, worlds=False),
)
HUGGING_FACE_MODULES = (
    "datasets",
    "peft",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "trl",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "kempner.integrations.transformers",
)


@dataclass(frozen=True)
class File:
    """The programs of one test file, the modules that they import, and how many of their cells
    `make check` plays."""

    programs: tuple[Program, ...]
    modules: tuple[str, ...]
    drawn: int


FILES = {
    "test_hugging_face": File(HUGGING_FACE, HUGGING_FACE_MODULES, 21),
}
