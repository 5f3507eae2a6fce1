"""Sizes of the transformer before it exists: shapes, parameter count, FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kempner.config.model import ModelSection, RopeScalingSection

FFN_MULTIPLE = 256


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched for longer texts; see `RopeScalingSection`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def of(cls, section: RopeScalingSection) -> RopeScaling | None:
        if section.factor is None or section.factor == 1:
            return None
        return cls(
            section.factor,
            section.low_freq_factor or 1.0,
            section.high_freq_factor or 4.0,
            section.original_max_position_embeddings or 8192,
        )


@dataclass(frozen=True)
class Shape:
    """Every size of the transformer. The names are those of `ModelSection`; `vocab_size` is the
    number of token ids. What was added later has the value that it had before as its default."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    dropout: float
    vocab_multiple: int = 1
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False

    @classmethod
    def of(cls, model: ModelSection, vocab_size: int) -> Shape:
        return cls(
            dim=model.dim,
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads or model.n_heads,
            head_dim=model.head_dim or model.dim // model.n_heads,
            ffn_dim=model.ffn_dim or default_ffn_dim(model.dim),
            vocab_size=vocab_size,
            max_seq_len=model.max_seq_len,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
            tie_embeddings=model.tie_embeddings,
            dropout=model.dropout,
            vocab_multiple=model.vocab_multiple,
            rope_scaling=RopeScaling.of(model.rope_scaling),
            qk_norm=model.qk_norm,
        )

    def fixed(self) -> dict[str, Any]:
        """What decides the weights' shapes and meaning: all but what may change between starts. Of
        what has a default, only what differs from it: the record of a model is the same as before
        there was such a field."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in _FREE and not (hasattr(Shape, name) and value == getattr(Shape, name))
        }

    @classmethod
    def recorded(cls, fixed: Mapping[str, Any], max_seq_len: int) -> Shape:
        """The shape, without dropout, of which `fixed` was recorded. Raises `TypeError` if that is
        of another model."""
        known = dict(fixed)
        if (scaling := known.pop("rope_scaling", None)) is not None:
            known["rope_scaling"] = RopeScaling(**scaling)
        return cls(**known, max_seq_len=max_seq_len, dropout=0.0)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the output projection, those of no token included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.n_kv_heads * self.head_dim

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention, SwiGLU and the norms."""
        attention = self.dim * (2 * self.q_dim + 2 * self.kv_dim)
        ffn = 3 * self.dim * self.ffn_dim
        return attention + ffn + self.block_norm_parameters

    @property
    def block_norm_parameters(self) -> int:
        """Parameters of the norms of one block: its two, and those of queries and keys."""
        return 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and the output projection, or of the tied embedding."""
        return self.vocab_rows * self.dim + self.dim

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedding, last norm, output projection."""
        tables = 1 if self.tie_embeddings else 2
        return tables * self.vocab_rows * self.dim + self.dim

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return self.n_layers * self.block_parameters + self.root_parameters


_FREE = ("dropout", "max_seq_len")
"""What a resume may change."""


def default_ffn_dim(dim: int) -> int:
    """8/3 of `dim`, rounded up to a multiple of 256. SwiGLU has three matrices where a plain layer
    has two; 2/3 of the usual 4 * dim keeps the number of parameters (Shazeer, "GLU Variants Improve
    Transformer", arXiv:2002.05202)."""
    exact = -(-8 * dim // 3)
    return -(-exact // FFN_MULTIPLE) * FFN_MULTIPLE


def model_record(model: ModelSection, vocab_size: int) -> dict[str, Any]:
    """What a checkpoint keeps of the model, and a resume must find again; plain JSON."""
    if model.factory is None:
        return Shape.of(model, vocab_size).fixed()
    options = model.model_dump(mode="json")["options"] or {}
    return {"factory": model.factory, "options": options, "vocab_size": vocab_size}


def count_parameters(model: ModelSection, vocab_size: int) -> int:
    """Number of parameters of the transformer; a tied embedding counts once."""
    return Shape.of(model, vocab_size).parameters


def flops_per_token(
    shape: Shape, seq_len: int, trained: int | None = None, reference: bool = False
) -> float:
    """Floating-point operations of a forward and backward pass, per token.

    6 N + 12 L H Q T, as in "PaLM", arXiv:2204.02311, appendix B: two operations per parameter
    and token forward and four backward, and the two attention products, without a discount for
    the causal mask. N counts the parameters that multiply: not the embedding, which is looked
    up, unless it is the output projection, too. Recomputed activations do not count. Where only
    `trained` parameters beside them train, a parameter has two operations backward less. The
    forward of a `reference`, without these, has two more, and a third of the attention.
    """
    looked_up = 0 if shape.tie_embeddings else shape.vocab_rows * shape.dim
    multiplied = shape.parameters - looked_up
    attention = 12 * shape.n_layers * shape.q_dim * seq_len
    products = 6 * multiplied if trained is None else 4 * multiplied + 6 * trained
    if reference:
        return float(products + attention + 2 * multiplied + attention / 3)
    return float(products + attention)
