"""One rank of a test: steps of loops with `Slots` on several meshes, and their bits.

Usage: slots_on_meshes.py OUT LOOP STEPS MESH...; all but a compiled one are "eager". A mesh is as
in 2x3: replicate, shard; "plain" is none. Rank 0 writes OUT.
Or, within `survive`: slots_on_meshes.py survive STEPS, with the mesh in the file `mesh`. Rank 0
prints the bits of each step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))
from any_world import digest

from kempner import Slots, survive
from kempner.checkpoint.tensors.state import capture

SLOTS, SIZE, SAMPLES = 10, 2, 61
"""Three ranks do not divide the slots, and neither does a tree."""
LENGTH, WORDS, WIDTH = 5, 23, 20


class Block(nn.Module):
    """A layer of torch's in a class of one's own, without which nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 27, activation=gelu, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.layer(x)
        return after


class Model(nn.Module):
    """Odd sizes, dropout, a tied embedding, what never trains, and what takes part in no slot."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.norm(self.frozen(x)) @ self.embed.weight.T


@dataclass(frozen=True)
class Loop:
    """What a program chooses."""

    optimizer: Callable[..., Optimizer] = AdamW
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    again: bool = False
    compiled: bool = False

    def model(self, mesh: str) -> nn.Module:
        torch.manual_seed(1)
        model = Model(self.again)
        if self.compiled:
            for block in model.blocks:
                block.compile()
        if mesh != "plain":
            replicas, shards = map(int, mesh.split("x"))
            names = ("of copies", "of rows")
            over = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
            if replicas == 1:
                over = init_device_mesh("cpu", (shards,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=over, mp_policy=self.policy)
        return model


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
LOOPS = {
    "AdamW": Loop(),
    "SGD": Loop(partial(SGD, momentum=0.9, nesterov=True, foreach=True)),
    "computed again": Loop(again=True),
    "bfloat16": Loop(policy=HALF),
}
COMPILED = {"compiled": Loop(compiled=True)}

Bits = tuple[int, str, str, str]
"""Of a step: its number, loss and norm in hexadecimal, and a digest of weights and moments."""


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> Iterator[Bits]:
    """The loop."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    slots = Slots(model, SLOTS, seed=4)
    for step in steps:
        for slot in slots.of(step):
            rows = tokens[slots.samples(slot, SIZE, SAMPLES)]
            logits = model(rows[:, :-1]).float()
            slots.add(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / SLOTS)
        loss, norm = slots.sum(), slots.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        state = digest(capture(model, optimizer))
        yield step, loss.item().hex(), norm.item().hex(), state


def bits(loop: Loop, mesh: str, steps: int) -> list[Bits]:
    """The bits of some steps on a mesh."""
    model = loop.model(mesh)
    return [*train(model, loop.optimizer(model.parameters(), lr=0.02), range(1, steps + 1))]


def compare(out: Path, which: str, steps: int, meshes: list[str]) -> None:
    """A rank: every loop on every mesh; rank 0 keeps the bits."""
    loops = LOOPS if which == "eager" else {which: (LOOPS | COMPILED)[which]}
    found = {
        (name, mesh): bits(loop, mesh, steps) for name, loop in loops.items() for mesh in meshes
    }
    if dist.get_rank() == 0:
        torch.save(found, out)
    print(f"rank {dist.get_rank()} has seen it all", flush=True)


def keep_going(steps: int) -> None:
    """A rank of a run."""
    loop = LOOPS["AdamW"]
    model = loop.model(Path("mesh").read_text())
    optimizer = loop.optimizer(model.parameters(), lr=0.02)
    counted = survive(model, optimizer, steps=steps, save_every=10, seed=4)
    for found in train(model, optimizer, counted):
        if dist.get_rank() == 0:
            print("step", *found, flush=True)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if arguments[0] == "survive":
        keep_going(int(arguments[1]))
        dist.destroy_process_group()
        return
    compare(Path(arguments[0]), arguments[1], int(arguments[2]), arguments[3:])
    dist.barrier()
    os._exit(0)  # as every rank of kempner: see sharded_gradients.py


if __name__ == "__main__":
    main(sys.argv[1:])
