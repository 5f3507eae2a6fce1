"""What an adapter is, before there is one: which layers have it, its sizes, its names elsewhere.

LoRA as PEFT has it: a linear layer with weight W, [outputs, inputs], computes W x + scale B A x,
with A, [rank, inputs], and B, [outputs, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kempner.config.model import PROJECTIONS, AdapterSection
from kempner.model.spec.huggingface import weight_name
from kempner.model.spec.shape import Shape

LAYERS: Mapping[str, str] = {
    "q_proj": "attention.wq",
    "k_proj": "attention.wk",
    "v_proj": "attention.wv",
    "o_proj": "attention.wo",
    "gate_proj": "ffn.w1",
    "up_proj": "ffn.w3",
    "down_proj": "ffn.w2",
}
"""The linear layers of a block, by Hugging Face's names."""

A, B = "lora_A", "lora_B"
"""What the two matrices of a layer are called, here and by PEFT."""


@dataclass(frozen=True)
class Adapter:
    """`targets` are the names of the layers that have it; see `AdapterSection`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    dropout: float = 0.0

    @classmethod
    def of(cls, section: AdapterSection) -> Adapter | None:
        """None if the whole model trains."""
        if section.rank is None:
            return None
        alpha = 2.0 * section.rank if section.alpha is None else section.alpha
        wanted = section.targets or PROJECTIONS
        targets = tuple(name for name in PROJECTIONS if name in wanted)
        return cls(section.rank, alpha, targets, bool(section.rslora), section.dropout or 0.0)

    @classmethod
    def recorded(cls, fixed: Mapping[str, Any]) -> Adapter:
        """The adapter, without dropout, of which `fixed` was recorded."""
        known = {name: value for name, value in fixed.items() if name != "scale"}
        return cls(**{**known, "targets": tuple(fixed["targets"])})

    def fixed(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, and a resume must find again; plain JSON."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": [*self.targets],
            "rslora": self.rslora,
            "scale": self.scale,
        }

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def layers(self) -> list[str]:
        """The layers of a block that have it, by the names of `Transformer`."""
        return [LAYERS[name] for name in self.targets]

    def widths(self, shape: Shape) -> list[tuple[int, int, bool]]:
        """Inputs and outputs of the layers of a block that have it, and whether a tensor group cuts
        the inputs and not the outputs."""
        dim, ffn = shape.dim, shape.ffn_dim
        sizes = {
            "q_proj": (dim, shape.q_dim, False),
            "k_proj": (dim, shape.kv_dim, False),
            "v_proj": (dim, shape.kv_dim, False),
            "o_proj": (shape.q_dim, dim, True),
            "gate_proj": (dim, ffn, False),
            "up_proj": (dim, ffn, False),
            "down_proj": (ffn, dim, True),
        }
        return [sizes[name] for name in self.targets]

    def block_elements(self, shape: Shape) -> int:
        """Numbers that train in one block."""
        return self.rank * sum(inputs + outputs for inputs, outputs, _ in self.widths(shape))

    def elements(self, shape: Shape) -> int:
        """Numbers that train."""
        return shape.n_layers * self.block_elements(shape)


def peft_name(name: str) -> str | None:
    """PEFT's name for a matrix of an adapter of `Transformer`; None if it is none."""
    layer, _, which = name.rpartition(".")
    weight = weight_name(f"{layer}.weight") if which in (A, B) else None
    return weight and f"base_model.model.{weight.removesuffix('.weight')}.{which}.weight"


def peft_config(adapter: Adapter, base: str | None) -> dict[str, Any]:
    """The `adapter_config.json` that PEFT reads; `base` is the path or the name of the model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "target_modules": [*adapter.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
