"""One rank of a test: a step on each mesh, and checkpoints from one to the next.

Usage: mesh_parity.py FOLDER MESH..., a mesh as in 2x1x2: replicate, shard, tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).parents[2]))
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.tensors.state import capture, local_part
from kempner.config.model import AdapterSection, PreferencesSection
from kempner.config.sections import Config, ModelSection, OptimizerSection, TrainSection
from kempner.data.order.batch_slices import PADDING, Slicing
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.adapter import adapted_layers, freeze
from kempner.model.initial_weights import initialise
from kempner.model.sharding import build_model
from kempner.model.spec.memory import Checkpointing
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.transformer import Transformer
from kempner.run.record.run_dir import RunDirectory
from kempner.training.compute.fingerprint import StateFingerprint, TableFingerprint, summed
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, clip_gradients, update

CPU = torch.device("cpu")
VOCAB = 257
ROWS, MICRO, LENGTH = 7, 2, 24
SIZES = {"dim": 48, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 100}


def config(
    checkpointing: Checkpointing = "none",
    *,
    compiled: bool = False,
    adapter: Mapping[str, object] | None = None,
    beta: float | None = None,
    **model: object,
) -> Config:
    return Config(
        model=ModelSection.model_validate({**SIZES, "head_dim": 6, "vocab_multiple": 4, **model}),
        train=TrainSection(
            seq_len=LENGTH,
            seed=5,
            global_batch_size=ROWS,
            micro_batch_size=MICRO,
            loss_chunk=20,
            activation_checkpointing=checkpointing,
            compile=compiled,
        ),
        optimizer=OptimizerSection(lr=1e-2),
        adapter=AdapterSection.model_validate(adapter or {}),
        preferences=PreferencesSection(beta=beta),
    )


ASKED = {
    "llama": config("full"),
    "compiled": config(compiled=True),
    "qwen": config(qk_norm=True, tie_embeddings=True, head_dim=16, vocab_multiple=128),
    "adapted": config("selective", adapter={"rank": 2, "targets": ["k_proj", "o_proj", "up_proj"]}),
    "preferring": config("full", adapter={"rank": 2}, beta=0.5),
}


@dataclass
class Made:
    """What a mesh made of a model: whole tensors, put together from all ranks."""

    loss: float
    norm: float
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    logits: Tensor
    """Of the first micro batch that a single process takes."""
    updated: dict[str, Tensor]
    """Weights and moments after the update."""


def built(asked: Config, mesh: DeviceMesh | None) -> Transformer:
    model = build_model(asked, VOCAB, CPU, mesh)
    set_weights(model, asked)
    return model


def set_weights(model: Transformer, asked: Config) -> None:
    """Weights of the seed, also where only an adapter trains; that adds something."""
    if asked.adapter.rank is not None:
        model.requires_grad_(True)
        initialise(model, asked.train.seed)
        freeze(model)
        for layer in adapted_layers(model).values():
            local_part(layer.lora_B).fill_(0.01)


def batch(data_rank: int = 0, data_world: int = 1, pairs: bool = False) -> list[MicroBatch]:
    """A part of the global batch, with tokens that do not count, and rows of padding; of `pairs`
    two in each row but one, which has one and padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[2, 5:] = IGNORE
    documents = (torch.arange(LENGTH, dtype=torch.int32) // 6).repeat(ROWS, 1)
    documents[3] = documents[3].clamp(max=2)
    none = torch.full((LENGTH,), -1, dtype=torch.int32)
    if pairs:
        targets[:, 5::6] = IGNORE
    nothing = torch.zeros(LENGTH, dtype=torch.int64), torch.full((LENGTH,), IGNORE)
    return [
        MicroBatch(
            torch.stack([nothing[0] if n == PADDING else tokens[n, :-1] for n in rows]),
            torch.stack([nothing[1] if n == PADDING else targets[n] for n in rows]),
            torch.stack([none if n == PADDING else documents[n] for n in rows]) if pairs else None,
        )
        for rows in Slicing(ROWS, MICRO, data_rank, data_world).rows(0)
    ]


def step(
    model: Transformer,
    optimizer: Optimizer,
    degrees: MeshDegrees,
    rank: int,
    asked: Config,
) -> Made:
    """The gradient of the whole batch, and an update by it."""
    weights = {name: whole(p).clone() for name, p in model.named_parameters()}
    beta = asked.preferences.beta
    mine = batch(degrees.data_rank(rank), degrees.data_world, pairs=asked.preferences.on)
    with torch.no_grad():
        logits = model(batch()[0].inputs)
    gradient = StepGradient(model, CPU, asked.train.seed, rank, degrees.tensor, beta=beta)
    (loss, *_) = gradient.add(mine, step=1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: whole(p.grad).clone() for name, p in trained.items()}
    norm = clip_gradients(model, 0.0).item()
    update(model, optimizer, loss, 1e-2, 0.5)
    return Made(loss.item(), norm, weights, gradients, logits, state(model, optimizer))


def state(model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and what the optimizer keeps, by the keys of a checkpoint."""
    return {key: whole(tensor).clone() for key, tensor in capture(model, optimizer).items()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def fingerprint_is_of_the_whole(
    model: Transformer, optimizer: Optimizer, wholes: Mapping[str, Tensor]
) -> bool:
    """Whether the parts of all ranks add up to the fingerprints of the whole tensors."""
    added = summed(
        StateFingerprint(model, optimizer, dist.get_rank(), dist.get_world_size()).local()
    )
    return torch.equal(added, TableFingerprint(wholes, 0, 1).local())


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def on_mesh(name: str, asked: Config, text: str, folder: Path) -> Made:
    """A step on a mesh, twice; before it the state of the mesh before, loaded; after it saved."""
    degrees = MeshDegrees(*map(int, text.split("x")))
    dimensions = degrees.dimensions()
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    rank = dist.get_rank()
    run = RunDirectory(folder / name)
    saves = dist.new_group(backend="gloo")
    assert isinstance(saves, dist.ProcessGroup)
    before = folder / f"{name}.pt"
    expected = torch.load(before) if before.exists() else None

    other = asked.model_copy(update={"train": asked.train.model_copy(update={"seed": 99})})
    loaded = built(other, mesh)
    optimizer = build_optimizer(loaded, asked.optimizer)
    manager = open_manager(run, loaded, optimizer, saves)
    found = manager.restore()
    assert (found is None) == (expected is None)
    if expected is not None:
        assert same(state(loaded, optimizer), expected), f"{name} on {text}: loaded otherwise"

    made = []
    for _ in range(2):
        model = built(asked, mesh)
        for block in model.blocks if asked.train.compile else ():
            # Without the kernels: what collectives become is decided before those are made.
            block.compiled = torch.compile(block.run, fullgraph=True, backend="aot_eager")
        kept = build_optimizer(model, asked.optimizer)
        made.append(step(model, kept, degrees, rank, asked))
    first, second = made
    assert (first.loss, first.norm) == (second.loss, second.norm)
    assert same(first.gradients, second.gradients), f"{name} on {text}: other bits"
    assert same(first.updated, second.updated)
    assert fingerprint_is_of_the_whole(model, kept, second.updated), f"{name} on {text}"

    manager.close()
    manager = open_manager(run, model, kept, saves)
    manager.save(TrainState(step=1 if found is None else found.step + 1))
    manager.join()
    assert manager.failures.count == 0, manager.failures.reason
    manager.close()
    if rank == 0:
        torch.save(second.updated, before)
    dist.barrier()
    return second


def main(folder: Path, meshes: list[str]) -> None:
    """A rank: every model on every mesh in turn; rank 0 keeps what they made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = {
        (name, text): vars(on_mesh(name, asked, text, folder))
        for name, asked in ASKED.items()
        for text in (meshes[-1:] if asked.train.compile else meshes)
    }
    if dist.get_rank() == 0:
        torch.save(made, folder / "made.pt")
    print(f"rank {dist.get_rank()} has seen it all", flush=True)
    dist.barrier()
    os._exit(0)  # as every rank of kempner: see sharded_gradients.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
