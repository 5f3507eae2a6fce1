"""Published models by name: what `model.preset` sets, as if each key had been written.

Sizes from the `config.json` of each: Llama 2 (arXiv:2307.09288), Llama 3, 3.1, 3.2 and 3.3
(arXiv:2407.21783), Qwen3 (arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal[
    "debug",
    "llama2-7b",
    "llama2-13b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.2-1b",
    "llama3.3-70b",
    "qwen3-32b",
]

MEANINGS: Mapping[str, str] = {
    "debug": "for tests: 4 blocks of width 256",
    "llama2-7b": "Llama 2 7B: 6.7 billion parameters",
    "llama2-13b": "Llama 2 13B: 13.0 billion",
    "llama2-70b": "Llama 2 70B: 69.0 billion, 8 key and value heads",
    "llama3-8b": "Llama 3 8B: 8.0 billion",
    "llama3-70b": "Llama 3 70B: 70.6 billion",
    "llama3.1-8b": "Llama 3.1 8B: 8.0 billion, positions scaled to 131,072 tokens",
    "llama3.1-70b": "Llama 3.1 70B: 70.6 billion, positions scaled",
    "llama3.2-1b": "Llama 3.2 1B: 1.2 billion, tied embeddings, positions scaled",
    "llama3.3-70b": "Llama 3.3 70B: the sizes of llama3.1-70b",
    "qwen3-32b": "Qwen3 32B: 32.8 billion, heads of 128 with their own norms",
}
"""What each name of a model stands for."""

_LLAMA2 = {"vocab_size": 32_000, "max_seq_len": 4096, "rope_theta": 10_000.0, "norm_eps": 1e-5}
_LLAMA3 = {"vocab_size": 128_256, "max_seq_len": 8192, "rope_theta": 500_000.0, "norm_eps": 1e-5}
_SCALED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_1 = {**_LLAMA3, "max_seq_len": 131_072, "rope_scaling": {"factor": 8.0, **_SCALED}}

_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14_336}
_70B = {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "ffn_dim": 28_672}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "debug": {"dim": 256, "n_layers": 4, "n_heads": 4, **_LLAMA2},
    "llama2-7b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 11_008, **_LLAMA2},
    "llama2-13b": {"dim": 5120, "n_layers": 40, "n_heads": 40, "ffn_dim": 13_824, **_LLAMA2},
    "llama2-70b": {**_70B, **_LLAMA2},
    "llama3-8b": {**_8B, **_LLAMA3},
    "llama3-70b": {**_70B, **_LLAMA3},
    "llama3.1-8b": {**_8B, **_LLAMA3_1},
    "llama3.1-70b": {**_70B, **_LLAMA3_1},
    "llama3.2-1b": {
        **{"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192},
        **{**_LLAMA3_1, "rope_scaling": {"factor": 32.0, **_SCALED}, "tie_embeddings": True},
    },
    "llama3.3-70b": {**_70B, **_LLAMA3_1},
    "qwen3-32b": {
        **{"dim": 5120, "n_layers": 64, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128},
        **{"ffn_dim": 25_600, "vocab_size": 151_936, "max_seq_len": 40_960},
        **{"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qk_norm": True},
    },
}
"""Keys of `ModelSection` by the name of a model, which is a `Preset`."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """A table of `[model]` with what its preset says in the place of the preset.

    A key that is given stays as it is. Where there is no such preset, the table is as it was.
    """
    name = given.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return dict(given)
    return _merged(PRESETS[name], {key: v for key, v in given.items() if key != "preset"})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    table = {**below, **above}
    for key, value in below.items():
        if isinstance(value, Mapping) and isinstance(given := above.get(key), Mapping):
            table[key] = _merged(value, given)
    return table
