"""docs/examples/with_grpo.py, which notes its losses, with trouble in its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trouble import note, strike

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "docs" / "examples"))
import with_grpo


class Noting(GRPOTrainer):
    """Notes the losses of a step, before trouble comes in it."""

    def training_step(self, *inputs: Any, **options: Any) -> Any:
        loss = super().training_step(*inputs, **options)
        step = self.state.global_step + 1
        note(step, [], loss.item())
        strike(step)
        return loss


if __name__ == "__main__":
    with_grpo.GRPOTrainer = Noting
    with_grpo.main()
    weights = with_grpo.LlamaForCausalLM.from_pretrained("final").state_dict()
    torch.save(weights, "final-0.pt")
