"""One rank of a test: losses and gradients by mesh and choice. Usage: communication_ranks.py OUT"""

from __future__ import annotations

import os
import socket
import struct
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.factory import place
from kempner.model.sharding import build_model
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.training.compute.forward_backward import StepGradient, summed_loss

CPU = torch.device("cpu")
VOCAB, LENGTH, MICRO_BATCHES, WORLD = 257, 16, 3, 4
CHOICES = [Choice(once, keep) for once, keep in product((False, True), repeat=2)]
MESHES = {
    "shards": MeshDegrees(shard=4),
    "replicas of shards": MeshDegrees(replicate=2, shard=2),
    "replicas": MeshDegrees(replicate=4),
    "shards of tensor groups": MeshDegrees(shard=2, tensor=2),
}


def config(**model: object) -> Config:
    sizes: dict[str, object] = {
        "dim": 48,
        "n_layers": 3,
        "n_heads": 6,
        "n_kv_heads": 2,
        "ffn_dim": 100,
    }
    sizes |= {"vocab_multiple": 2, **model}
    train = TrainSection(seq_len=LENGTH, seed=5)
    return Config(model=ModelSection.model_validate(sizes), train=train)


MODELS = {"untied": config(), "tied": config(tie_embeddings=True), "own": config()}
MODELS["checkpointed"] = Config(
    model=MODELS["untied"].model,
    train=TrainSection(seq_len=LENGTH, seed=5, activation_checkpointing="full", loss_chunk=5),
)
CASES = [
    (model, mesh)
    for model, mesh in product(MODELS, MESHES)
    if model != "own" or MESHES[mesh].tensor == 1
]
WIDE = config(dim=192, ffn_dim=512)
"""Wide enough for what a message is wrapped in to be little beside it."""


class Own(nn.Module):
    """A model as a user may write it: blocks are used last to first, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in (*reversed(self.layers), self.layers[1]):
            x = x + layer(x).tanh()
        logits: Tensor = self.out(x)
        return logits


Outcome = tuple[float, float, dict[str, Tensor]]
"""Loss of a step, loss of an evaluation after it, and the step's whole gradients."""


def build(name: str, mesh: object, choice: Choice) -> nn.Module:
    if name != "own":
        return build_model(MODELS.get(name, WIDE), VOCAB, CPU, mesh, choice)  # type: ignore[arg-type]
    torch.manual_seed(3)
    return place(Own(), MODELS[name], VOCAB, CPU, mesh, choice)  # type: ignore[arg-type]


def micro_batches(rank: int, world: int) -> list[MicroBatch]:
    """This rank's part of a step of 8 sequences; the last is one that weighs nothing."""
    tokens = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = tokens.tensor_split(world)[rank]
    batches = [MicroBatch(rows[:, :-1], rows[:, 1:]) for rows in mine.tensor_split(2)]
    shape = (1, LENGTH)
    empty = MicroBatch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE))
    return [*batches, empty]


def step(model: nn.Module, choice: Choice, rank: int, degrees: MeshDegrees) -> Tensor:
    gradient = StepGradient(model, CPU, seed=1, rank=rank, copies=degrees.tensor, choice=choice)
    return gradient.add(micro_batches(degrees.data_rank(rank), degrees.data_world), step=1)


def outcome(name: str, mesh: object, choice: Choice, rank: int, degrees: MeshDegrees) -> Outcome:
    """The second of two steps: the first leaves nothing behind."""
    model = build(name, mesh, choice)
    for _ in range(2):
        model.zero_grad()
        loss = step(model, choice, rank, degrees)
    model.eval()  # in training a forward without gradients, of a reference, keeps what it gathers
    with torch.no_grad():
        held_out = summed_loss(model, micro_batches(0, 1)[0], CPU)
    model.train()
    # What an optimizer or a checkpoint lists after a step, or an evaluation, is this rank's shards.
    gradients = {name: whole(p.grad, degrees.world) for name, p in model.named_parameters()}
    return loss.item(), held_out.item(), gradients


def whole(gradient: Tensor | None, world: int) -> Tensor:
    assert gradient is not None
    assert gradient.dtype is torch.float32
    assert isinstance(gradient, DTensor) is (world > 1)
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def sent() -> int:
    """Bytes that this process has sent on its TCP connections, as their peers have confirmed.

    `tcpi_bytes_acked` of Linux's `struct tcp_info`: what was carried, without headers.
    """
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not entry.readlink().name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("=Q", info, 120)[0]
        except OSError:  # closed meanwhile, or one that listens
            continue
    return total


def carried(rank: int, world: int) -> dict[str, int]:
    """Bytes that this rank sends in the second step, by choice."""
    found = {}
    for choice in CHOICES:
        model = build("wide", init_device_mesh("cpu", (world,)), choice)
        step(model, choice, rank, MeshDegrees(shard=world))
        dist.barrier()
        before = sent()
        step(model, choice, rank, MeshDegrees(shard=world))
        dist.barrier()
        found[choice.describe()] = sent() - before
    return found


def device_mesh(degrees: MeshDegrees) -> DeviceMesh:
    sizes = degrees.dimensions()
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def main(out: str) -> None:
    """A rank: on 4 ranks all meshes, on 2 the bytes; rank 0 keeps the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results: object
    if world == WORLD:
        meshes = {name: device_mesh(degrees) for name, degrees in MESHES.items()}
        results = {
            (model, mesh, choice.describe()): outcome(
                model, meshes[mesh], choice, rank, MESHES[mesh]
            )
            for (model, mesh), choice in product(CASES, CHOICES)
        }
    else:
        results = carried(rank, world)
    if rank == 0:
        torch.save(results, out)
    print(f"rank {rank} has seen it all", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
