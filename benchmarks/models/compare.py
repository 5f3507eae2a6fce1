"""Times a training step of kempner's Llama against the same sizes in transformers and torchtitan.

    python benchmarks/models/compare.py [--how eager] [--size debug] [--rounds 9] [--steps 4]

Each library has a process of its own, with one thread. They train in turns, one after the other in
each round: the same plain loop, batch, sizes, float32, loss and fused AdamW. A ratio is that of two
turns of one round, so that what else the machine does touches both alike. Memory is counted,
not that of the process: the tensors that stay from step to step, and the most that torch's
allocator had handed out on top of them at any moment of one step. With `--how compiled` each model
is compiled as one and the loss is plain; with `--how best` kempner has its own loss in chunks and
its own compiled blocks, the others model and loss compiled as one.

With `--how sft` it is trainers that take turns, each with its own loop, loader, clipping and log,
over the same chats: `kempner train`, which packs them two in a row, and TRL's `SFTTrainer`, which
pads them. A step learns from as many chats in both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

LIBRARIES = ("kempner", "transformers", "torchtitan")
TRAINERS = ("kempner", "trl")
HOW = ("eager", "compiled", "best", "sft")


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

    rest: Any = {"attn_implementation": "sdpa", "use_cache": False}
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.seq,
        tie_word_embeddings=False,
        **rest,
    )
    return LlamaForCausalLM(config)


def torchtitan_model(size: Size) -> nn.Module:
    """torchtitan's Llama 3 with its own defaults."""
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")  # the real ones want triton
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sides: Any = {"dim": size.dim, "n_layers": size.layers, "n_heads": size.heads}
    rest: Any = {"vocab_size": size.vocab, "multiple_of": size.ffn, "max_seq_len": size.seq}
    model: Any = Transformer(TransformerModelArgs(**sides, **rest))
    with torch.no_grad():
        model.init_weights()
    assert model.layers["0"].feed_forward.w1.out_features == size.ffn
    return model


BUILD: dict[str, Callable[[Size], nn.Module]] = {
    "kempner": kempner_model,
    "transformers": transformers_model,
    "torchtitan": torchtitan_model,
}


@dataclass(frozen=True)
class Turn:
    """What one turn took, in seconds per step."""

    wall: float
    cpu: float
    loss: float = math.nan


@dataclass(frozen=True)
class Memory:
    """Bytes: of parameters, buffers and optimizer between steps, and the most of all in one."""

    kept: int
    peak: int


def take_turns(library: str, size: Size, how: str, steps: int) -> None:
    """Answer each line on stdin with one on stdout: `steps` steps, or the memory of one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step, kept = _step(library, size, how)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(json.dumps(asdict(_memory(step, kept))), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        took = (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
        print(json.dumps(asdict(Turn(*took, loss.item()))), flush=True)


def _step(library: str, size: Size, how: str) -> tuple[Callable[[], Tensor], Callable[[], int]]:
    """A step, and what counts the bytes that stay after one."""
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
        from kempner.model.sharding import compile_blocks, keep_compiled

        keep_compiled(Path(tempfile.mkdtemp(prefix="compare-")))
        compile_blocks(model)
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

    def kept() -> int:
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.buffers(), *states, inputs, tokens, targets]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    return step, kept


def _memory(step: Callable[[], Tensor], kept: Callable[[], int]) -> Memory:
    """Count one step by what the allocator reports to the profiler: bytes taken and given back."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    reports = [event for event in results.events() if event.name() == "[memory]"]
    reports.sort(key=lambda event: event.start_ns())
    live = itertools.accumulate(event.nbytes() for event in reports)
    before = kept()
    return Memory(before, before + max(live))


class TurnsOfTrainer:
    """Lines on stdin, each of which lets a trainer make some steps, and the answers to them."""

    def __init__(self, steps: int) -> None:
        self._steps, self._left, self._began = steps, 0, (0.0, 0.0)
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a trainer prints is no answer

    def go_on(self, made: int = 1) -> bool:
        """To be asked before a first step, and after each `made` more; False when it is over."""
        now = time.perf_counter(), time.process_time()
        self._left -= made
        if self._left > 0:
            return True
        if self._left == 0:
            wall, cpu = (each - b for each, b in zip(now, self._began, strict=True))
            turn = asdict(Turn(wall / self._steps, cpu / self._steps))
            print(json.dumps(turn), file=self._answers, flush=True)
        more = bool(sys.stdin.readline())
        self._left, self._began = self._steps, (time.perf_counter(), time.process_time())
        return more


def chats(folder: Path, size: Size) -> tuple[Path, list[dict[str, Any]]]:
    """A tokenizer, and chats for a hundred steps, of which two fit into a row."""
    from tiny_tokenizers import chat_of_half_a_row, template_of_trl, write_tokenizer

    from kempner.data.files.chat_template import ChatTemplate

    tokenizer = write_tokenizer(folder / "tokenizer", "llama3", template_of_trl("llama3_training"))
    template, draw = ChatTemplate.beside(tokenizer), Random(1)
    count = 2 * size.batch * 100
    return tokenizer, [chat_of_half_a_row(draw, template, size.seq) for _ in range(count)]


RATES: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}


def train_with_kempner(size: Size, steps: int) -> None:
    """`kempner train`, alone, but for the turns that its loop is cut into."""
    from kempner.config.sections import Config
    from kempner.data.prepare.pipeline import prepare
    from kempner.run.process.exit_codes import ExitCode
    from kempner.training import loop
    from kempner.training import main as rank
    from kempner.training.rank_link.rank_link import open_rank_link
    from kempner.training.rank_link.shutdown import StopListener

    folder = Path(tempfile.mkdtemp(prefix="compare-"))
    tokenizer, records_of_chats = chats(folder, size)
    lines = "".join(json.dumps(each) + "\n" for each in records_of_chats)
    (folder / "chats.jsonl").write_text(lines, encoding="utf-8")
    files, data = [folder / "chats.jsonl"], folder / "data"
    prepare(data, files, tokenizer=str(tokenizer), kind="chats", seq_len=size.seq)
    sizes = {"dim": size.dim, "n_layers": size.layers, "n_heads": size.heads}
    batch = {"global_batch_size": size.batch, "micro_batch_size": size.batch}
    config = Config.model_validate(
        {
            "run": {"dir": str(folder), "name": "run"},
            "model": {**sizes, "ffn_dim": size.ffn, "vocab_size": size.vocab},
            "train": {"seq_len": size.seq, "max_steps": 10**6, "threads": 1, **batch},
            "optimizer": RATES,
            "scheduler": {"name": "constant", "warmup_steps": 0},
            "data": {"dataset_path": str(data)},
            "checkpoint": {"interval": 10**6},
        }
    )
    turns = TurnsOfTrainer(steps)

    def train(run: Any) -> ExitCode:
        while turns.go_on(steps):
            until = {"max_steps": run.train_state.step + steps}
            section = run.config.train.model_copy(update=until)
            run.config = run.config.model_copy(update={"train": section})
            loop.train(run)
        os._exit(0)

    loop.finish_run = lambda run, agreed: ExitCode.COMPLETED  # between turns nothing is saved
    rank.train = train  # type: ignore[attr-defined]
    shutdown = StopListener()
    rank.main(config, open_rank_link(config, shutdown), shutdown)


def train_with_trl(size: Size, steps: int) -> None:
    """`SFTTrainer`, but for the turns that a callback cuts its steps into."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder, turns = Path(tempfile.mkdtemp(prefix="compare-")), TurnsOfTrainer(steps)
    tokenizer, records_of_chats = chats(folder, size)

    class Turns(TrainerCallback):
        def on_train_begin(self, *given: Any, **rest: Any) -> None:
            turns.go_on()

        def on_step_end(self, *given: Any, **rest: Any) -> None:
            if not turns.go_on():
                os._exit(0)

    torch.set_num_threads(1)
    beta1, beta2 = RATES["betas"]
    arguments = SFTConfig(
        str(folder / "out"),
        max_length=size.seq,
        assistant_only_loss=True,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * size.batch,
        max_steps=10**6,
        adam_beta1=beta1,
        adam_beta2=beta2,
        learning_rate=RATES["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    model: Any = transformers_model(size)
    SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(records_of_chats),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        callbacks=[Turns()],
    ).train()


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
        return Turn(**self._answer("turn"))

    def memory(self) -> Memory:
        """Of one more step."""
        return Memory(**self._answer("memory"))

    def _answer(self, question: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a library's process has ended; its words are above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def share(ours: list[float], theirs: list[float]) -> tuple[float, list[float]]:
    """Median of the ratios of turns that belong together, and the quarters around it."""
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return middle, [low, high]


def compared(how: str, size: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each library, after `rounds` turns of each."""
    passed_on = ["--size", size, "--steps", str(steps), "--how", how]
    names = TRAINERS if how == "sft" else LIBRARIES
    contenders = {library: Contender(library, passed_on) for library in names}
    for contender in contenders.values():
        contender.turn()  # imports, compiles, and allocates the optimizer's state
    turns: dict[str, list[Turn]] = {library: [] for library in names}
    for _ in range(rounds):
        for library, contender in contenders.items():
            turns[library].append(contender.turn())
    # A trainer is not asked for its memory.
    peaks = {} if how == "sft" else {name: c.memory().peak for name, c in contenders.items()}
    for contender in contenders.values():
        contender.close()
    ours = [turn.cpu for turn in turns["kempner"]]
    rows = []
    for library, theirs in turns.items():
        cpu = [turn.cpu for turn in theirs]
        row: dict[str, Any] = {"size": size, "how": how, "library": library}
        row["processor ms"] = statistics.median(cpu) * 1e3
        if peaks:
            row["MiB"] = peaks[library] / 2**20
        if library != "kempner":
            row["kempner's time"], row["quartiles"] = share(ours, cpu)
        if peaks and library != "kempner":
            row["kempner's memory"] = peaks["kempner"] / peaks[library]
        rows.append(row)
    return rows


def main() -> None:
    """Print a table; or take turns, with `--library`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", choices={*LIBRARIES, *TRAINERS})
    parser.add_argument("--how", choices=HOW, default="eager")
    parser.add_argument("--size", choices=SIZES, default="debug")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    records.add_option(parser)
    args = parser.parse_args()
    if args.library and args.how == "sft":
        train = {"kempner": train_with_kempner, "trl": train_with_trl}[args.library]
        size = SIZES[args.size]  # the tokenizer has more tokens than bytes
        train(replace(size, vocab=max(512, size.vocab)), args.steps)
        return
    if args.library:
        take_turns(args.library, SIZES[args.size], args.how, args.steps)
        return
    rows = compared(args.how, args.size, args.rounds, args.steps)
    proves: tuple[str, ...] = ("kempner/model", "kempner/training/compute")
    if args.how == "sft":
        proves = ("kempner/data", "kempner/model", "kempner/training")
        records.result(args.record, "trainers", proves, rows, "size")
        return
    records.result(args.record, "model", proves, rows, "size", "how")


if __name__ == "__main__":
    main()
