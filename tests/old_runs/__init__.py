"""Runs that earlier commits have left unfinished, and what those commits would have made of them.

`<commit>.tar.xz` holds a folder for each run as it was when it was stopped or killed, with its
program and data, and `made.json`: with what it was made, and what the same run was undisturbed.
`make.py` makes one.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"


@dataclass(frozen=True)
class OldRun:
    """How a run is started, in its folder, and how long it is."""

    name: str
    ranks: int
    command: tuple[str, ...]
    steps: int
    per_epoch: int | None
    """Samples, each once; None if there is one epoch."""

    @property
    def record(self) -> Path:
        """Its run directory, in its folder."""
        return Path("runs") / self.name


def _own(name: str, ranks: int) -> OldRun:
    return OldRun(name, ranks, ("run.toml", f"--run.name={name}"), steps=40, per_epoch=None)


def _program(name: str, ranks: int) -> OldRun:
    return OldRun(name, ranks, ("--", "python", f"{name}.py"), steps=24, per_epoch=48)


RUNS = (
    _own("one_rank", 1),
    _own("two_ranks", 2),
    _own("killed", 2),
    _program("own_loop", 2),
    _program("transformers_trainer", 1),
    _program("lightning_trainer", 1),
)
"""Each was stopped in the middle; `killed` was killed as a whole between two commits."""


@dataclass(frozen=True)
class Step:
    """What the ranks did in a step, the last time that it was made: each entry is a rank's.

    `loss` is to the last bit; `state` is the digest of what a program began the step with.
    """

    samples: list[list[int]]
    loss: list[str]
    state: list[str]


def steps_of(folder: Path, run: OldRun) -> dict[int, Step]:
    """All that were made in this folder, in their order."""
    noted = _own_notes if (folder / "run.toml").exists() else _program_notes
    by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
    for line in noted(folder, run):
        by_step.setdefault(line["step"], {})[line["rank"]] = line
    return {
        step: Step(
            [ranks[rank]["samples"] for rank in sorted(ranks)],
            [ranks[rank]["loss"] for rank in sorted(ranks)],
            [ranks[rank]["state"] for rank in sorted(ranks)],
        )
        for step, ranks in sorted(by_step.items())
    }


def _program_notes(folder: Path, run: OldRun) -> list[dict[str, Any]]:
    files = [folder / f"notes-{rank}.jsonl" for rank in range(run.ranks)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _own_notes(folder: Path, run: OldRun) -> list[dict[str, Any]]:
    """The loss is that of all ranks, and the gradient norm with it."""
    metrics = (folder / run.record / "metrics.jsonl").read_text().splitlines()
    losses = {line["step"]: f"{line['loss']!r} {line['grad_norm']!r}" for line in _json(metrics)}
    files = [folder / run.record / f"samples/rank-{n:05}.jsonl" for n in range(run.ranks)]
    lines = [line for file in files for line in _json(file.read_text().splitlines())]
    # A killed run may have told the samples of a step, and not its loss.
    return [{**line, "loss": losses.get(line["step"], ""), "state": ""} for line in lines]


def _json(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def final_digest(folder: Path, run: OldRun) -> str:
    """Of the weights with which the run ended."""
    if (final := folder / "final.txt").exists():
        return final.read_text()
    last = max((folder / run.record / "checkpoints").glob("step-*"))
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(last, file.name)
        return digest(torch.load(file.name))


def digest(state: object) -> str:
    """Of all tensors and numbers in nested mappings and sequences."""
    whole = hashlib.sha256()

    def add(value: object, name: str) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(value[key], f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                add(item, f"{name}.{index}")
        else:
            whole.update(name.encode())
            plain = value.detach().contiguous().flatten() if isinstance(value, Tensor) else None
            content = repr(value) if plain is None else plain.view(torch.uint8).numpy().tobytes()
            whole.update(content.encode() if isinstance(content, str) else content)

    add(state, "")
    return whole.hexdigest()


def bits_of_this_machine() -> str:
    """What this CPU and this torch make of the operations that the runs are made of.

    Nothing of kempner is in it: where it is the same as on the machine that made an old run, other
    losses are kempner's doing.
    """
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    parts = nn.ModuleList([_Block(16, 32, 257), _Block(16, 32, 96), _Block(32, 64, 1)])
    optimizers = [
        torch.optim.AdamW(parts.parameters(), lr=1e-2, fused=fused) for fused in (True, False)
    ]
    losses = []
    for step in range(12):
        loss = torch.stack([part() for part in parts]).sum()
        loss.backward()
        losses += [loss.item().hex(), nn.utils.clip_grad_norm_(parts.parameters(), 1.0)]
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    torch.set_num_threads(threads)
    torch.set_rng_state(before)
    return digest([losses, parts.state_dict()])


class _Block(nn.Module):
    """A layer of a transformer, and a curve: the operations of the old runs, in their sizes."""

    def __init__(self, dim: int, hidden: int, words: int) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(max(words, 2), dim)
        self.mix = nn.Linear(dim, 3 * dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm = nn.RMSNorm(dim)
        self.out = nn.Linear(dim, words)

    def forward(self) -> Tensor:
        ids = torch.randint(max(self.words, 2), (2, 16))
        x = self.norm(self.embedding(ids))
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + nn.functional.dropout(attended.transpose(1, 2).flatten(2), 0.1)
        x = x + self.down(nn.functional.silu(self.up(x)) + torch.tanh(self.up(x)))
        x = self.out(x * torch.cos(x) + torch.sin(6 * x))
        if self.words == 1:
            return x.square().mean()
        return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten())


def as_json(steps: Mapping[int, Step]) -> dict[str, Any]:
    return {str(number): asdict(step) for number, step in steps.items()}


def from_json(steps: Mapping[str, Any]) -> dict[int, Step]:
    return {int(number): Step(**step) for number, step in steps.items()}
