"""Hugging Face's names for the weights and sizes of Llama and Qwen3.

The weights need no change but their names: both turn the halves of a head by their positions. See
`LlamaForCausalLM`, `Qwen3ForCausalLM` and their configurations in the library `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from kempner.config.model import ModelSection
from kempner.model.spec.shape import Shape
from kempner.run.process.exit_codes import DataError

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_NEEDED = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size")
_UNNEEDED = re.compile(r".*\.rotary_emb\.inv_freq")
"""What old files have besides weights; it follows from the sizes."""


def weight_name(name: str) -> str | None:
    """Hugging Face's name for a parameter of `Transformer`; None if it is none."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _TOP.get(name)
    rest = _IN_LAYER.get(layer[2])
    return rest and f"model.layers.{layer[1]}.{rest}"


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every parameter of `Transformer`, by its own name, without rows of no token."""
    table = (shape.vocab_size, shape.dim)
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (shape.dim,),
        "attention.wq.weight": (shape.q_dim, shape.dim),
        "attention.wk.weight": (shape.kv_dim, shape.dim),
        "attention.wv.weight": (shape.kv_dim, shape.dim),
        "attention.wo.weight": (shape.dim, shape.q_dim),
        "ffn_norm.weight": (shape.dim,),
        "ffn.w1.weight": (shape.ffn_dim, shape.dim),
        "ffn.w2.weight": (shape.dim, shape.ffn_dim),
        "ffn.w3.weight": (shape.ffn_dim, shape.dim),
    }
    if shape.qk_norm:
        block |= {f"attention.{which}_norm.weight": (shape.head_dim,) for which in "qk"}
    return {
        "embed.weight": table,
        **{
            f"layers.{n}.{name}": size
            for n in range(shape.n_layers)
            for name, size in block.items()
        },
        "norm.weight": (shape.dim,),
        **({} if shape.tie_embeddings else {"output.weight": table}),
    }


def is_unneeded(name: str, shape: Shape) -> bool:
    """Whether a tensor of theirs follows from others: tables of positions, a tied output."""
    tied = shape.tie_embeddings and name == _TOP["output.weight"]
    return tied or _UNNEEDED.fullmatch(name) is not None


def model_config(record: Mapping[str, Any], dtype: str) -> dict[str, Any] | None:
    """The `config.json` for a model of which `record` was kept (`Shape.fixed`); None if it is none.
    `dtype` is that of the weights. What follows from the text that it was trained on, `text_config`
    says."""
    try:
        shape = Shape.recorded(record, max_seq_len=1)
    except TypeError:  # another model's record, or none
        return None
    config: dict[str, Any] = {
        "architectures": [QWEN3 if shape.qk_norm else LLAMA],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": dtype,
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
    }
    config |= {"use_sliding_window": False} if shape.qk_norm else {"mlp_bias": False}
    if shape.rope_scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    return config


def model_section(config: Mapping[str, Any]) -> ModelSection:
    """What `[model]` must be for a model with this `config.json`; `vocab_size` is set. Raises
    `DataError` for a model that `Transformer` is not."""
    qk_norm = _architecture(config) == QWEN3
    _refuse_others(config)
    found = {ours: config[theirs] for ours, theirs in _SIZES.items() if config.get(theirs)}
    if missing := [_SIZES[name] for name in _NEEDED if name not in found]:
        raise DataError(f"config.json has no {missing[0]}")
    if qk_norm:
        found = {"head_dim": 128, **found, "qk_norm": True}  # the default of Qwen3Config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found["rope_theta"] = rope.get("rope_theta", found.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        found["rope_scaling"] = {key: rope[key] for key in keys if key in rope}
    elif kind != "default":
        raise DataError(f"its positions are scaled by the rule {kind}; kempner has that of Llama 3")
    found.setdefault("norm_eps", 1e-6)  # the default of both
    if longest := config.get("max_position_embeddings"):
        found["max_seq_len"] = longest
    try:
        return ModelSection.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(
            f"the sizes in config.json make no sense: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}"
        ) from error


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in (LLAMA, QWEN3):
        raise DataError(
            f"config.json has the architecture {', '.join(map(str, named)) or 'of nothing'}; "
            f"kempner has {LLAMA} and {QWEN3}"
        )
    return str(named[0])


def _refuse_others(config: Mapping[str, Any]) -> None:
    """Raise `DataError` for what would change the result and `Transformer` does not have."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            raise DataError(f"config.json sets {key}, which kempner's transformer does not have")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise DataError(f"config.json has hidden_act {activation}; kempner's transformer has silu")


def text_config(eot: int | None, longest: int | None) -> dict[str, Any]:
    """What `config.json` says of the text.

    `eot` is the token between two documents: it ends one and begins the next. None says that there
    is none; the reader would take tokens of another vocabulary otherwise. `longest` is the number
    of tokens that the model was trained with at once.
    """
    table = {"bos_token_id": eot, "eos_token_id": eot}
    return table if longest is None else {"max_position_embeddings": longest, **table}


def generation_config(eot: int) -> dict[str, Any]:
    """The `generation_config.json`: a text ends with its document, and so is a batch filled up."""
    return {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
