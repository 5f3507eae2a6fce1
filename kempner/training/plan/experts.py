"""Memory of a mixture of experts on a rank, by the degree of expert parallelism (EP).

With EP ranks that share the experts, a rank has `experts / EP` of each layer. The parameters of a
Hugging Face model are counted on the meta device, which takes no memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from kempner.model.spec.memory import USED
from kempner.run.process.exit_codes import UsageError

WEIGHT_BYTES = 2
"""Bytes of a parameter in bfloat16."""

TRAINING_BYTES = 16
"""Bytes of a parameter that AdamW trains: weight, gradient and two moments in float32; or weight
and gradient in bfloat16 with float32 master weights and moments."""

GATHERED_LAYERS = 2
"""Layers that are gathered at a time if the state is sharded: one in use, one prefetched."""


@dataclass(frozen=True)
class ExpertModel:
    """A mixture-of-experts model with `experts` in each layer. `expert_parameters` counts those of
    all experts in all layers, `other_parameters` all others, including shared experts."""

    experts: int
    layers: int
    expert_parameters: int
    other_parameters: int

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.other_parameters


@dataclass(frozen=True)
class Division:
    """Bytes of a rank if `expert_parallel` ranks share the experts, without activations and caches.

    Attributes:
        weights: in bfloat16, for generation or conversion.
        sharded: for training with equal state sharded over ranks (FSDP, ZeRO-3).
        whole: for training with a full copy on each rank (DDP).
    """

    expert_parallel: int
    experts: int
    weights: int
    sharded: int
    whole: int


def divide_experts(model: ExpertModel, world: int) -> list[Division]:
    """All degrees of EP on `world` ranks, ascending: those that divide the experts of a layer and
    the ranks."""
    found = []
    for ep in range(1, world + 1):
        if model.experts % ep or world % ep:
            continue
        own = -(-model.expert_parameters // ep) + model.other_parameters
        gathered = WEIGHT_BYTES * GATHERED_LAYERS * -(-own // model.layers)
        sharded = TRAINING_BYTES * -(-model.parameters // world) + gathered
        weights, whole = WEIGHT_BYTES * own, TRAINING_BYTES * own
        found.append(Division(ep, model.experts // ep, weights, sharded, whole))
    return found


def fits(needed: int, memory: int) -> bool:
    """Whether `needed` bytes fit on a GPU with `memory` bytes."""
    return needed <= USED * memory


_EXPERT = re.compile(r"\.experts\.")
_NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def count_experts(path: Path) -> ExpertModel:
    """Count the parameters of the model in a `config.json`, or a folder with one. Does not run the
    model's own code (`trust_remote_code`). Raises `UsageError` if the file cannot be read, if
    transformers is missing or does not know the model, or if it has no experts."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    numbers = [content.get(n) for n in _NUMBER_OF_EXPERTS] if isinstance(content, dict) else []
    experts = next((number for number in numbers if number), None)
    if experts is None:
        raise UsageError(f"{file} describes no mixture of experts; use `kempner plan` for others")
    try:
        import torch  # not needed for the arithmetic alone
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            "the parameters are counted by transformers: pip install 'kempner[transformers]'"
        ) from error
    try:
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(
            f"{file}: transformers does not know this model: {str(error).splitlines()[0]}"
        ) from error
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if _EXPERT.search(name))
    return ExpertModel(
        experts=experts,
        layers=config.num_hidden_layers,
        expert_parameters=of_experts,
        other_parameters=sum(sizes.values()) - of_experts,
    )
