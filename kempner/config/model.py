"""Configuration of the model: a transformer by its sizes or its name, or a model of your own; of
the adapter that trains beside its weights; and of how ranks share the work.

Sizes of published models are from the `config.json` of each: Llama 2 (arXiv:2307.09288), Llama 3,
3.1, 3.2 and 3.3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from kempner.config.section import PURE, Key, PositiveFloat, PositiveInt, Section

Preset = Literal[
    "debug", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-8b",
    "llama3.1-70b", "llama3.2-1b", "llama3.3-70b", "qwen3-32b",
]  # fmt: skip

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
"""The meaning of each preset."""

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
"""Keys of `ModelSection` by `Preset`."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """A table of `[model]` with the values of its preset, if it has one, for keys that are not
    given."""
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


_SIZES_BEYOND = ("vocab_size", "max_seq_len")
"""Keys of `[model]` that also apply to a model of your own."""


def _names_function(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ValueError(f'"{text}" names no function; write "package.module:function"')
    return text


class RopeScalingSection(Section):
    """Rotary positions stretched for longer texts, as in Llama 3.1."""

    factor: Annotated[PositiveFloat | None, Key("times", 8.0)] = None
    """Factor by which low frequencies are stretched, such as 8; 1 by default, which changes
    nothing."""
    low_freq_factor: Annotated[PositiveFloat | None, Key(PURE, 1.0)] = None
    """Wavelengths above original_max_position_embeddings / this are stretched in full; 1 by
    default."""
    high_freq_factor: Annotated[PositiveFloat | None, Key(PURE, 4.0)] = None
    """Wavelengths below original_max_position_embeddings / this are not stretched; 4 by default."""
    original_max_position_embeddings: Annotated[PositiveInt | None, Key("tokens", 8192)] = None
    """Longest sequence before the stretching; 8192 by default."""

    @model_validator(mode="after")
    def _obeys_what_is_set(self) -> Self:
        if self.factor is None:
            for option, value in self:
                if value is not None:
                    raise ValueError(f"{option} has no effect without factor")
        if (self.low_freq_factor or 1.0) >= (self.high_freq_factor or 4.0):
            raise ValueError("low_freq_factor must be below high_freq_factor")
        return self


class ModelSection(Section):
    """Sizes of a decoder-only transformer of the Llama family, or a model of your own."""

    preset: Annotated[Preset | None, Key(values=MEANINGS)] = None
    """A published model, whose sizes are used for all keys that are not given. The run records the
    sizes, not the name."""
    factory: Annotated[
        Annotated[str, AfterValidator(_names_function)] | None,
        Key(example="my_model:build", form="a function, package.module:function"),
    ] = None
    """A model of your own instead: "package.module:function", called with options and vocab_size.
    Then no key but options, vocab_size and max_seq_len has an effect."""
    options: Annotated[dict[str, Any] | None, Key(example={"width": 512})] = None
    """A table of arguments for factory; empty by default."""
    dim: Annotated[PositiveInt, Key("elements", 1024)] = 256
    """Width of the residual stream."""
    n_layers: Annotated[PositiveInt, Key("blocks", 24)] = 4
    """Number of transformer blocks."""
    n_heads: Annotated[PositiveInt, Key("heads", 16)] = 4
    """Number of query heads."""
    n_kv_heads: Annotated[PositiveInt | None, Key("heads", 4)] = None
    """Number of key and value heads (grouped-query attention); n_heads by default."""
    head_dim: Annotated[PositiveInt | None, Key("elements", 128)] = None
    """Width of one head; dim / n_heads by default."""
    ffn_dim: Annotated[PositiveInt | None, Key("elements", 2816)] = None
    """Width of the SwiGLU layer; by default 8/3 of dim rounded up to a multiple of 256."""
    vocab_size: Annotated[PositiveInt | None, Key("tokens", 32_000)] = None
    """Number of token ids; by default the vocabulary of data.dataset_path's index."""
    vocab_multiple: Annotated[PositiveInt, Key("rows", 128)] = 1
    """Rows of embedding and output projection are padded to a multiple of this. Padding rows are
    never predicted, and exports for Hugging Face leave them out."""
    max_seq_len: Annotated[PositiveInt, Key("tokens", 8192)] = 4096
    """Longest sequence that the rotary position table covers."""
    rope_theta: Annotated[PositiveFloat, Key(PURE, 500_000.0)] = 10_000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScalingSection = RopeScalingSection()
    """No scaling by default."""
    norm_eps: Annotated[PositiveFloat, Key(PURE, 1e-6)] = 1e-5
    """Epsilon of RMSNorm."""
    qk_norm: bool = False
    """Apply RMSNorm to each head of queries and keys before the rotary embedding, as in Qwen3."""
    tie_embeddings: bool = False
    """Use the token embedding as the output projection as well."""
    dropout: Annotated[float, Field(ge=0, lt=1), Key("probability", 0.1)] = 0.0
    """Probability of dropping an element of each residual branch."""

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if {"preset", "factory"} <= given.keys():
            raise ValueError("preset has no effect with factory; remove one of them")
        return with_preset(given)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError(
                f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or set head_dim"
            )
        if (self.head_dim or self.dim // self.n_heads) % 2:
            raise ValueError("the head width must be even: rotary positions turn pairs")
        return self

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.factory is None:
            if self.options is not None:
                raise ValueError("options has no effect without factory; remove it")
            return self
        for name, field in type(self).model_fields.items():
            ours = name in ("factory", "options", *_SIZES_BEYOND)
            if not ours and getattr(self, name) != field.get_default():
                raise ValueError(f"{name} has no effect with factory; put it into options")
        return self


Projection = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]  # fmt: skip
"""The linear layers of a block, as Hugging Face calls them."""

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


class AdapterSection(Section):
    """LoRA (Hu et al., arXiv:2106.09685): the weights of an imported model stay as they are, and a
    pair of small matrices beside each is all that trains. Only with rank."""

    rank: Annotated[PositiveInt | None, Key("rows", 16)] = None
    """Rows of the first matrix of a pair, and columns of the second; none by default: the whole
    model trains."""
    alpha: Annotated[PositiveFloat | None, Key(PURE, 32.0)] = None
    """What a pair adds is multiplied by alpha / rank; twice the rank by default."""
    dropout: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, Key("probability", 0.05)] = None
    """Probability of dropping an element of what goes into a pair; 0 by default."""
    targets: Annotated[
        list[Projection] | None,
        Key(
            example=["q_proj", "v_proj"],
            values={
                "q_proj": "queries",
                "k_proj": "keys",
                "v_proj": "values",
                "o_proj": "what attention writes",
                "gate_proj": "the feed-forward's gate",
                "up_proj": "what the gate multiplies",
                "down_proj": "what the feed-forward writes",
            },
        ),
    ] = None
    """Which linear layers of each block get a pair; all by default."""
    rslora: Annotated[bool | None, Key(example=True)] = None
    """Multiply by alpha / sqrt(rank) instead, as rank-stabilised LoRA (arXiv:2312.03732) does;
    false by default."""

    @model_validator(mode="after")
    def _obeys_what_is_set(self) -> Self:
        if self.rank is None:
            for name in type(self).model_fields:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} has no effect without rank; set rank, or remove it")
        if self.targets is not None and len({*self.targets}) < len(self.targets):
            raise ValueError("targets names a layer twice")
        if self.targets == []:
            raise ValueError("targets names no layer; remove it for all of them")
        return self

    def refuse_beside(self, model: ModelSection, optimizer: str, fp8: bool, tensor: int) -> None:
        """Raise `ValueError` for what an adapter does not work with."""
        refused = {
            "model.factory": (model.factory is not None, "has no layers of known names"),
            'optimizer.name="muon"': (optimizer == "muon", "is for whole weight matrices"),
            "train.fp8": (fp8, "would replace the layers that have it"),
            "adapter.dropout in a tensor group (parallelism.tensor_parallel_degree)": (
                bool(self.dropout) and tensor > 1,
                "would drop other elements of one input on each of its ranks",
            ),
        }
        for key, (asked, why) in refused.items():
            if asked and self.rank is not None:
                raise ValueError(f"[adapter] does not work with {key}, which {why}; remove one")


class PreferencesSection(Section):
    """Training on pairs of a chosen and a rejected answer (DPO, Rafailov et al., arXiv:2305.18290).
    Only with beta."""

    beta: Annotated[PositiveFloat | None, Key(PURE, 0.1)] = None
    """How closely the model is held to the reference, which is the imported model without its
    adapter; the smaller, the further it may move. None by default: the data holds no pairs."""

    @property
    def on(self) -> bool:
        return self.beta is not None

    def refuse_beside(self, adapter: AdapterSection, on_any_world: bool) -> None:
        """Raise `ValueError` if there is no reference, or for what it does not work with."""
        if self.on and on_any_world:
            raise ValueError(
                "preferences.beta does not work with train.same_on_any_world, whose sums are of "
                "tokens; remove one"
            )
        if self.on and adapter.rank is None:
            raise ValueError(
                "preferences.beta needs adapter.rank, since the reference is the model without its "
                "adapter; set it, or remove preferences.beta"
            )


Degree = Annotated[int, Field(ge=-1)]


class ParallelismSection(Section):
    """How the ranks share the work (a mesh of replicate x shard x tensor ranks), and when they
    communicate."""

    data_parallel_replicate_degree: Annotated[Degree, Key("groups of ranks", 2)] = 1
    """Number of replicas of the model, each sharded over its own group of ranks and trained on its
    own samples (HSDP); -1 is what the other degrees leave."""
    data_parallel_shard_degree: Annotated[Degree, Key("ranks", 8)] = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 is what
    the other degrees leave."""
    tensor_parallel_degree: Annotated[PositiveInt, Key("ranks", 4)] = 1
    """Ranks, next to each other on one node, that compute each layer together on the same samples
    (tensor and sequence parallel)."""
    reduce_gradients: Annotated[
        Literal["auto", "step", "micro_batch"],
        Key(
            values={
                "auto": "the choice that sends least and fits into GPU memory; on CPUs micro_batch",
                "step": "once per step; until then a rank keeps unsharded gradients in float32",
                "micro_batch": "after every micro batch",
            }
        ),
    ] = "auto"
    """When gradients are summed over the ranks that share the parameters."""
    reshard_after_forward: Annotated[
        Literal["auto", "always", "never"],
        Key(
            values={
                "auto": "the choice that sends least and fits into GPU memory; on CPUs always",
                "always": "freed after a block's forward, gathered again for its backward",
                "never": "kept until the last backward of the step",
            }
        ),
    ] = "auto"
    """Whether the gathered parameters of a block are freed before its backward."""

    @model_validator(mode="after")
    def _degrees_leave_ranks(self) -> Self:
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if 0 in (replicate, shard):
            raise ValueError("a degree of 0 leaves no ranks; write 1, or -1 for what is left")
        if replicate == shard == -1:
            raise ValueError(
                "only one of data_parallel_replicate_degree and data_parallel_shard_degree can be "
                "-1, what is left"
            )
        return self
