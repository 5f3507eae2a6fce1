"""docs/examples/with_experts.py, which notes its losses, with trouble in its steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from trouble import note, strike

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "docs" / "examples"))
import with_experts


class Noting(with_experts.Qwen3MoeForCausalLM):
    """Notes the losses of a step, before trouble comes in it."""

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        step = loop["steps"].train_state.step + 1
        note(step, [], out.loss.item())
        strike(step)
        return out


loop: dict[str, Any] = {}
"""What the example trains, and its steps."""


def survive(model: Any, *given: Any, **options: Any) -> Any:
    loop["model"], loop["steps"] = model, kept(model, *given, **options)
    return loop["steps"]


if __name__ == "__main__":
    kept, with_experts.survive = with_experts.survive, survive
    with_experts.Qwen3MoeForCausalLM = Noting
    end, with_experts.dist.destroy_process_group = with_experts.dist.destroy_process_group, int
    with_experts.main()
    weights = {name: p.full_tensor() for name, p in loop["model"].named_parameters()}
    torch.save(weights, f"final-{os.environ['RANK']}.pt")
    end()
