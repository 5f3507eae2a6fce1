"""Hugging Face's names for Llama's weights and sizes.

The weights need no change but their names: both turn the halves of a head by their positions. See
`LlamaForCausalLM` and `LlamaConfig` of the library `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


def llama_name(name: str) -> str | None:
    """Hugging Face's name for a parameter of `Transformer`; None if it is none."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _TOP.get(name)
    rest = _IN_LAYER.get(layer[2])
    return rest and f"model.layers.{layer[1]}.{rest}"


def llama_config(shape: Mapping[str, Any], dtype: str) -> dict[str, Any] | None:
    """The `config.json` for a model of this shape (fields of `Shape`); None if sizes are missing.

    `dtype` is that of the weights. What follows from the text that it was trained on, `text_config`
    says.
    """
    if not _SIZES.keys() <= shape.keys():
        return None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **{theirs: shape[ours] for ours, theirs in _SIZES.items()},
    }


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
