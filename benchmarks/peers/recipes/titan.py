"""torchtitan's own trainer, with its own checkpoints; it has no answer to a signal.

What torchtitan asks a GPU, a CPU answers, as in the tests of its integration.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import task

TESTS = Path(__file__).resolve().parents[3] / "tests" / "distributed" / "integrations" / "own"


def main() -> None:
    os.environ["ACCUMULATION"] = str(task.ACCUMULATION)
    sys.path.append(str(TESTS))
    import own_titan as titan
    import torch

    tokenizer = Path(f"tokenizer-{task.RANK}")
    titan.write_tokenizer(tokenizer)
    sys.argv[1:] = titan.arguments(tokenizer)
    titan.prepare_for_cpu()
    from torchtitan import train
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    class Noting(train.Trainer):
        """Notes what it trains on."""

        def forward_backward_step(self, *, input_dict: Any, **more: Any) -> Any:
            ids = (input_dict["input"][:, 1] - len(titan.PADS)).tolist()
            loss = super().forward_backward_step(input_dict=input_dict, **more)
            task.note(self.step, ids, loss.item())
            return loss

        def train(self) -> None:
            super().train()
            torch.save(self.model_parts[0].state_dict(), task.FOLDER / f"final-{task.RANK}.pt")

    DATASETS["words"] = DatasetConfig("words", titan.samples, lambda sample: sample["text"])
    train.main(Noting)


if __name__ == "__main__":
    main()
