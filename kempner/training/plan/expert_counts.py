"""Counts the parameters of a Hugging Face model with experts, on the meta device: no memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from kempner.model.spec.experts import ExpertModel
from kempner.run.process.exit_codes import UsageError

_EXPERT = re.compile(r"\.experts\.")
_NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def count_experts(path: Path) -> ExpertModel:
    """Of the model that a `config.json`, or a folder with one, describes.

    Its own code (`trust_remote_code`) is not run. Raises `UsageError` if the file cannot be read,
    if transformers is missing or does not know the model, or if it has no experts.
    """
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
