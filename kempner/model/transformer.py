"""A decoder-only transformer of the Llama family: Llama 2 and 3, and Qwen3; and text from it.

RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU, no biases; where
asked for, RMSNorm over each head of queries and keys, too.

Rotary positions turn element i of a head together with element i + head_dim / 2 ("rotate half",
the layout of Hugging Face's Llama), not with its neighbour as in Meta's own files: weights can be
exchanged with Hugging Face by renaming alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model import fused
from kempner.model.fused import cross_entropy, linear_cross_entropy
from kempner.model.spec.shape import RopeScaling, Shape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


Mode = Literal["full", "selective"]
"""full: a block keeps its input only. selective: what its matrices and attention returned, too, so
that nothing dear is computed twice."""

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""For the forward, and for what is computed again."""
_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._scaled_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
)
"""Operations whose results "selective" keeps: as in torchtitan, those that cost most."""


def checkpointed(
    mode: Mode, function: Callable[..., Tensor], *inputs: object, draws: bool
) -> Tensor:
    """`function` of these inputs, which alone are kept, or what `mode` says. Gradients are the same
    bits as without. `draws` is whether it uses random numbers, as dropout does: they are drawn
    again as they were."""
    from torch.utils.checkpoint import checkpoint  # its first call imports torch's compiler

    kept: dict[str, Any] = {} if mode == "full" else {"context_fn": _contexts}
    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=draws, **kept
    )
    return result


def _contexts() -> _Contexts:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    made: _Contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return made


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


Mask: TypeAlias = "Tensor | BlockMask"
"""Which token sees which: bool, [batch, 1, seq, seq]; or the same for FlexAttention, by blocks."""


class KVCache:
    """Keys and values of the tokens that a block has read, so that they are computed once. Filled
    by any number of tokens, at most `capacity`, and then by one at a time; has `length`."""

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._held: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these at the end; [batch, kv_heads, tokens, head_dim] each.

        Raises `ValueError` if it holds tokens already and these are several: attention would need
        a mask.
        """
        if self.length and k.shape[2] != 1:
            raise ValueError(f"{k.shape[2]} tokens at once for a cache of {self.length}")
        if self._held is None:
            batch, heads, _, head_dim = k.shape
            self._held = k.new_empty(2, batch, heads, self._capacity, head_dim)
        end = self.length + k.shape[2]
        self._held[0, :, :, self.length : end] = k
        self._held[1, :, :, self.length : end] = v
        self.length = end
        keys, values = self._held[:, :, :, :end]
        return keys, values


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """The number of each token's document, int32, [batch, seq]: how many have ended before it.
    `end` is the token that ends a document, and belongs to it."""
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(1, dtype=torch.int32) - ends


def document_mask(numbers: Tensor, cached: int = 0) -> Mask:
    """A token sees itself and what comes before it in its document, as in Llama 3.

    FlexAttention, which skips blocks that are masked out, where it has a backward: on CUDA.
    Elsewhere a mask of all pairs.

    Args:
        numbers: int32, [batch, seq], of each token's document.
        cached: if not 0, all tokens but the last, which alone gets a mask: [batch, 1, 1, seq].
    """
    if cached:
        return (numbers[:, -1:] == numbers)[:, None, None]
    if numbers.device.type == "cuda":
        return block_mask(numbers)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()


def block_mask(numbers: Tensor) -> BlockMask:
    """The mask for FlexAttention, of the number of each token's document."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[batch, query] == numbers[batch, key])

    batch, seq = numbers.shape
    return create_block_mask(sees, batch, None, seq, seq, device=numbers.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, grouped: bool) -> Tensor:
    """What each query takes from the values that it sees; [batch, heads, seq, head_dim].

    Args:
        q: [batch, heads, seq, head_dim].
        k: the same with as many heads, or with fewer if `grouped`; with more tokens, if those of
            `q` are the last one alone.
        v: as `k`.
        mask: None for all that come before.
        grouped: whether several heads of `q` share one of `k` and `v`.
    """
    if mask is None:
        causal = q.shape[2] == k.shape[2]  # else the one query is the last token, and sees all
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return flex(q.device.type)(q, k, v, block_mask=mask, enable_gqa=grouped)


@cache
def flex(device: str) -> Callable[..., Tensor]:
    """FlexAttention; compiled for CUDA, where it would otherwise hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    attention: Callable[..., Tensor] = compiled
    return attention


def rotary_table(
    head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Cosines and sines of the rotary positions, float32 on CPU, [2, max_seq_len, head_dim].

    The angle of pair i at position t is t * theta ** (-2 i / head_dim) (Su et al., "RoFormer",
    arXiv:2104.09864), of a stretched frequency where there is `scaling`. Computed on CPU so that
    every device gets the same bits.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = stretched(frequencies, scaling)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies for longer texts, as `apply_scaling` of Meta's `llama-models` has them.

    Those that turned less than `low_freq_factor` times in a text of the original length are divided
    by `factor`, those that turned more than `high_freq_factor` times stay, and those between are
    interpolated by the number of their turns.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class Attention(nn.Module):
    """Causal grouped-query attention; [batch, seq, dim] to the same shape. See `attend`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.grouped = shape.n_kv_heads != shape.n_heads
        self.wq = nn.Linear(shape.dim, shape.q_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wo = nn.Linear(shape.q_dim, shape.dim, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, cache: KVCache | None = None
    ) -> Tensor:
        projections = (self.wq, self.wk, self.wv)
        if fused.usable(x, *projections):
            weights = (projection.weight for projection in projections)
            made: tuple[Tensor, ...] = fused.Projections.apply(x, *weights)  # type: ignore[no-untyped-call]
            projected = tuple(map(fused.shown, projections, (x,) * 3, made))
        else:
            projected = tuple(projection(x) for projection in projections)
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in projected)  # type: ignore[no-untyped-call]
        if self.q_norm is not None and self.k_norm is not None:
            # In the weights' type, as autocast leaves them: only so is the norm one kernel.
            q = self.q_norm(q.to(self.q_norm.weight.dtype))
            k = self.k_norm(k.to(self.k_norm.weight.dtype))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        q, k = fused.rotate(q, cos, sin), fused.rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        attended = attend(q, k, v, mask, self.grouped)
        mixed: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x); [batch, seq, dim] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, x: Tensor, computed_again: bool = False) -> Tensor:
        if not computed_again and fused.usable(x, self.w1, self.w2, self.w3):
            weights = self.w1.weight, self.w3.weight, self.w2.weight
            fed: Tensor = fused.FusedFeedForward.apply(x, *weights)  # type: ignore[no-untyped-call]
        else:
            fed = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return fed


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream behind dropout.

    Attributes:
        checkpointing: what the backward computes again; None keeps everything.
        compiled: `run`, compiled; None computes as it is written.
        draws: whether it uses random numbers, as dropout does.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.checkpointing: Mode | None = None
        self.compiled: Callable[..., Tensor] | None = None
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self.draws = shape.dropout > 0

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, cache: KVCache | None = None
    ) -> Tensor:
        if self.compiled is None and self.checkpointing is None:
            return self._computed(x, cos, sin, mask, cache)
        # An evaluation must not begin by compiling what it needs without gradients.
        if self.compiled is None or not torch.is_grad_enabled():
            return self.run(x, cos, sin, mask, cache)
        return self.compiled(x, cos, sin, mask)

    def run(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, cache: KVCache | None = None
    ) -> Tensor:
        """The block itself, keeping for its backward what `checkpointing` says."""
        if self.checkpointing is None or not torch.is_grad_enabled():
            return self._computed(x, cos, sin, mask, cache)
        return checkpointed(self.checkpointing, self._computed, x, cos, sin, mask, draws=self.draws)

    def _computed(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, cache: KVCache | None = None
    ) -> Tensor:
        normed = fused.rms_norm(x, self.attention_norm)
        x = x + self.dropout(self.attention(normed, cos, sin, mask, cache))
        fed = self.ffn(fused.rms_norm(x, self.ffn_norm), self.checkpointing == "full")
        deeper: Tensor = x + self.dropout(fed)
        return deeper


class ShardedVocabulary(Protocol):
    """Stands for the output projection where its rows are spread over a tensor group."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """float32, [batch, seq, vocab_size], whole on every rank of the group."""
        ...

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, each: bool = False) -> Tensor:
        """The cross entropy in nats, summed over all targets that count, on every rank; or that of
        each token."""
        ...


class Transformer(nn.Module):
    """Tokens to logits, or with targets to their loss.

    Parameters: `embed.weight`, `layers.<i>.attention_norm.weight`,
    `layers.<i>.attention.{wq,wk,wv,wo}.weight`, `layers.<i>.ffn_norm.weight`,
    `layers.<i>.ffn.{w1,w2,w3}.weight`, `norm.weight` and, unless the embedding is tied,
    `output.weight`; with norms of queries and keys `layers.<i>.attention.{q_norm,k_norm}.weight`.

    Attributes:
        autocast_dtype: type in which matrices multiply while the parameters stay as they are;
            None multiplies in the parameters' own type.
        loss_chunk: most tokens whose logits exist at once when the loss is asked for; 0 is all.
        fused_head: whether the last norm may take the fused kernel; it never does where it is
            sharded with the output projection.
        document_end: the token that ends a document, if tokens attend to their own only and their
            documents are not given. Positions count on from one document to the next: rotary ones
            only tell how far two are apart.
        vocabulary: computes logits and loss under tensor parallelism; None without it.
    """

    rotary: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.autocast_dtype: torch.dtype | None = None
        self.loss_chunk = 0
        self.fused_head = True
        self.document_end: int | None = None
        self.vocabulary: ShardedVocabulary | None = None
        # Its own initial values, on the meta device, would import torch's compiler.
        rows = torch.empty(shape.vocab_rows, shape.dim)
        self.embed = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.output = (
            None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab_rows, bias=False)
        )
        empty = torch.empty(2, shape.max_seq_len, shape.head_dim, dtype=torch.float32)
        self.register_buffer("rotary", empty, persistent=False)

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Sequence[KVCache] | None = None,
        documents: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        """Logits of the next token, float32, [batch, seq, vocab_size]; with targets their cross
        entropy in nats, a sum: computed here, where a sharded output projection is gathered.

        Args:
            tokens: int64, [batch, seq], seq at most `shape.max_seq_len`.
            targets: int64, [batch, seq], `IGNORE` where there is none.
            cache: one for each block. The tokens that it holds are not computed again, and get no
                logits: all of them, or all but the last one, are new.
            documents: int32, [batch, seq], the number of each token's document, to which alone it
                attends; without it `document_end` says which they are.
            each: with targets, give the cross entropy of each token, float32, [batch * seq], 0
                where there is no target; only if the output projection does not train.
        """
        known = cache[0].length if cache else 0
        cos, sin = self.rotary[:, known : tokens.shape[1]]
        if documents is None and self.document_end is not None:
            documents = document_numbers(tokens, self.document_end)
        mask = None if documents is None else document_mask(documents, known)
        kind, dtype = tokens.device.type, self.autocast_dtype
        with nullcontext() if dtype is None else torch.autocast(kind, dtype):
            x = self.embed(tokens[:, known:])
            for number, layer in enumerate(self.layers):
                x = layer(x, cos, sin, mask, None if cache is None else cache[number])
            # Before the output projection is used: where sharded, this gathers it, too.
            hidden = fused.rms_norm(x, self.norm) if self.fused_head else self.norm(x)
            weight = self.embed.weight if self.output is None else self.output.weight
            if targets is not None and self.loss_chunk > 0 and self.vocabulary is None:
                sizes = {"vocab_size": self.shape.vocab_size, "chunk": self.loss_chunk}
                return linear_cross_entropy(
                    hidden.flatten(0, 1), weight, targets.flatten(), **sizes, each=each
                )
            return self._unchunked(hidden, weight, targets, each)

    def _unchunked(
        self, hidden: Tensor, weight: Tensor, targets: Tensor | None, each: bool
    ) -> Tensor:
        """Logits, or the loss from all of them at once, or from a tensor group's."""
        if self.vocabulary is not None:
            if targets is None:
                return self.vocabulary.logits(hidden, weight)
            return self.vocabulary.loss(hidden, weight, targets, each)
        logits = F.linear(hidden, weight).float()
        if self.shape.vocab_rows != self.shape.vocab_size:
            # Rows of no token are never predicted so, and get no gradient. FSDP needs no view.
            logits = logits[..., : self.shape.vocab_size].contiguous()
        return logits if targets is None else cross_entropy(logits, targets, each)


_COLD = 1e-5
"""Temperatures below this leave one token, and soon nothing but infinities."""


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    *,
    context: int,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """The tokens that a model adds to a prompt, without end.

    Each costs the forward of one token, since keys and values are cached. Once `context` tokens are
    held, the oldest quarter of them is forgotten and the others are read again. The model's mode is
    left as it is: call `eval()` first if it has dropout.

    Args:
        prompt: int64, [tokens], at least one, on the model's device.
        context: how many tokens to look back, at most `model.shape.max_seq_len`; the length that
            the model was trained with is best.
        temperature: divides the logits; 0, or less than 1e-5, always takes the likeliest token.
        top_k: sample from this many likeliest tokens only; from all when None.
        top_p: sample from the likeliest tokens only that have this probability together.
        generator: source of randomness, on the model's device; the global one when None.
    """
    tokens = prompt[-context:]
    cache = _empty_cache(model, context)
    while True:
        logits = model(tokens[None], cache=cache)[0, -1]
        drawn = _draw(logits, temperature, top_k, top_p, generator)
        yield int(drawn)
        tokens = torch.cat((tokens, drawn))
        if tokens.numel() > context:
            tokens = tokens[max(1, context // 4) :]
            cache = _empty_cache(model, context)


def _empty_cache(model: Transformer, context: int) -> list[KVCache]:
    return [KVCache(context) for _ in model.layers]


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator | None,
) -> Tensor:
    """One token id, int64 [1], from the logits [vocab_size] of the last position."""
    if temperature < _COLD:
        return logits.argmax(keepdim=True)
    scaled = (logits - logits.max()) / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ranked, ids = probabilities.sort(descending=True)
        unneeded = ranked.cumsum(-1) - ranked >= top_p  # the tokens before have it already
        unneeded[0] = False
        probabilities[ids[unneeded]] = 0.0
    return torch.multinomial(probabilities, 1, generator=generator)
