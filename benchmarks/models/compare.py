"""Times a training step of kempner's Llama against the same sizes in transformers and torchtitan.

    python benchmarks/models/compare.py [--how eager] [--size debug] [--rounds 9] [--steps 4]

Each library has a process of its own, with one thread. They train in turns, one after the other in
each round: the same plain loop, batch, sizes, float32, loss and fused AdamW. A ratio is that of two
turns of one round, so that what else the machine does touches both alike. Memory is what the
process had at most in its last turns, less what it had before the model was built. With `--how
best` kempner has its own loss in chunks and its own compiled blocks, the others model and loss
compiled as one. torchtitan must be on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARIES = ("kempner", "transformers", "torchtitan")
HOW = ("eager", "compiled", "best")


@dataclass(frozen=True)
class Size:
    """Of a model, and of its micro batch."""

    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    seq: int
    batch: int


SIZES = {
    "debug": Size(257, 128, 5, 4, 384, 128, 8),
    "wide": Size(8192, 256, 4, 4, 768, 256, 4),
    "vocabulary": Size(32000, 256, 4, 4, 768, 256, 4),
}


def kempner_model(size: Size) -> nn.Module:
    """The model of `kempner.model`."""
    from kempner.config.sections import Config, ModelSection, TrainSection
    from kempner.model.sharding import build_model

    section = ModelSection(
        dim=size.dim,
        n_layers=size.layers,
        n_heads=size.heads,
        ffn_dim=size.ffn,
        max_seq_len=size.seq,
        vocab_size=size.vocab,
    )
    train = TrainSection(seq_len=size.seq)
    return build_model(Config(model=section, train=train), size.vocab, torch.device("cpu"), None)


def transformers_model(size: Size) -> nn.Module:
    """`LlamaForCausalLM`, with scaled dot product attention and without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.seq,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def torchtitan_model(size: Size) -> nn.Module:
    """torchtitan's Llama 3 with its own defaults: one matrix for queries, keys and values."""
    from torchtitan.models import llama3  # type: ignore[import-not-found]
    from torchtitan.models.common import (  # type: ignore[import-not-found]
        ComplexRoPE,
        Embedding,
        Linear,
        RMSNorm,
    )
    from torchtitan.models.common.attention import (  # type: ignore[import-not-found]
        ScaledDotProductAttention,
    )

    sides = {"embedding_dim": size.dim, "num_embeddings": size.vocab}
    rope = ComplexRoPE.Config(dim=size.dim // size.heads, max_seq_len=size.seq, theta=10_000.0)
    layers = llama3._build_llama3_layers(
        n_layers=size.layers,
        dim=size.dim,
        n_heads=size.heads,
        hidden_dim=size.ffn,
        rope=rope,
        attn_backend="varlen",
    )
    for layer in layers:  # what it would take for text needs a GPU, or masks of documents
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=size.dim,
        vocab_size=size.vocab,
        tok_embeddings=Embedding.Config(**sides, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=size.dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=size.dim,
            out_features=size.vocab,
            param_init=llama3._output_linear_init(size.dim),
        ),
        layers=layers,
    )
    model: nn.Module = config.build()
    model.init_states(buffer_device=None)  # type: ignore[operator]
    return model


BUILD: dict[str, Callable[[Size], nn.Module]] = {
    "kempner": kempner_model,
    "transformers": transformers_model,
    "torchtitan": torchtitan_model,
}


@dataclass(frozen=True)
class Turn:
    """What one turn took, in seconds per step, and the most bytes so far."""

    wall: float
    cpu: float
    peak: int
    loss: float


def take_turns(library: str, size: Size, how: str, steps: int) -> None:
    """Train for `steps` at each line on stdin, and answer with a line on stdout."""
    import torch._dynamo  # one library has it from the beginning, another from its first step

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _step(
        library, Size(8, 16, 1, 2, 32, 8, 1), "eager"
    )()  # what is imported late is not the model's memory
    before = psutil.Process().memory_info().rss
    step = _step(library, size, how)
    first = True
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        took = (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
        print(json.dumps(asdict(Turn(*took, _peak() - before, loss.item()))), flush=True)
        if first:  # a compiler's memory is not the steps'
            Path("/proc/self/clear_refs").write_text("5")
            first = False


def _step(library: str, size: Size, how: str) -> Callable[[], Tensor]:
    model: Any = BUILD[library](size).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size.vocab, (size.batch, size.seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def plain_loss() -> Tensor:
        out = model(inputs)
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def own_loss() -> Tensor:
        summed: Tensor = model(inputs, targets)
        return summed / targets.numel()

    loss_of = plain_loss
    if how == "best" and library == "kempner":
        from kempner.model.compilation import compile_blocks

        compile_blocks(model, Path(tempfile.mkdtemp(prefix="compare-")))
        loss_of = own_loss
    elif how == "best":
        loss_of = torch.compile(plain_loss)
    elif how == "compiled":
        model.compile()

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


class Contender:
    """A library's process."""

    def __init__(self, library: str, arguments: list[str]) -> None:
        command = [sys.executable, __file__, "--library", library, *arguments]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def turn(self) -> Turn:
        """The next one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a library's process has ended; its words are above")
        return Turn(**json.loads(line))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ratios(ours: list[float], theirs: list[float]) -> str:
    """Median, and the quarters around it, of the ratios of turns that belong together."""
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print a table; or take turns, with `--library`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--how", choices=HOW, default="eager")
    parser.add_argument("--size", choices=SIZES, default="debug")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.library:
        take_turns(args.library, SIZES[args.size], args.how, args.steps)
        return
    passed_on = ["--size", args.size, "--steps", str(args.steps), "--how", args.how]
    contenders = {library: Contender(library, passed_on) for library in LIBRARIES}
    for contender in contenders.values():
        contender.turn()  # imports, compiles, and allocates the optimizer's state
    turns: dict[str, list[Turn]] = {library: [] for library in LIBRARIES}
    for _ in range(args.rounds):
        for library, contender in contenders.items():
            turns[library].append(contender.turn())
    for contender in contenders.values():
        contender.close()
    print(f"{args.size}, {args.how}, load {os.getloadavg()[0]:.1f}")
    ours = turns["kempner"]
    for library, theirs in turns.items():
        wall, cpu = [turn.wall for turn in theirs], [turn.cpu for turn in theirs]
        line = (
            f"{library:13} {statistics.median(wall) * 1e3:8.1f} ms wall "
            f"{statistics.median(cpu) * 1e3:8.1f} ms processor {theirs[-1].peak / 2**20:7.0f} MiB"
        )
        if library != "kempner":
            line += (
                f"   kempner needs {ratios([turn.wall for turn in ours], wall)} wall, "
                f"{ratios([turn.cpu for turn in ours], cpu)} processor, "
                f"{ours[-1].peak / theirs[-1].peak:.2f} memory"
            )
        print(line)


if __name__ == "__main__":
    main()
