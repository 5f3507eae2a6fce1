"""One rank of a test: steps of several models, replicated and sharded, and their bits.

Usage: any_world.py OUT MODELS MESH..., a mesh as in 2x3: replicate, shard; 2x3* with slots in turn.
Rank 0 writes OUT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parent))
from mesh_parity import set_weights

from kempner.checkpoint.tensors.state import capture
from kempner.config.sections import Config
from kempner.data.order.batch_slices import PADDING, Slicing
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.sharding import build_model, compile_blocks
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.transformer import Transformer
from kempner.training.compute.fingerprint import StateFingerprint, summed, text_of
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.slot_gradient import SlotGradient

CPU = torch.device("cpu")
VOCAB, STEPS = 261, 4
ROWS, MICRO, LENGTH = 11, 2, 24
"""Six slots, of which the last is half empty: no world but one divides them as a tree does."""
SIZES = {"dim": 40, "n_layers": 3, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 52}


def config(
    model: Mapping[str, object] | None = None,
    train: Mapping[str, object] | None = None,
    **more: object,
) -> Config:
    sizes = {"dropout": 0.1, **SIZES, **(model or {})}
    steps = {"seq_len": LENGTH, "global_batch_size": ROWS, "micro_batch_size": MICRO, "threads": 1}
    whole = {
        "model": sizes,
        "train": {**steps, "seed": 5, "same_on_any_world": True, **(train or {})},
        "optimizer": {"lr": 1e-2},
        **more,
    }
    return Config.model_validate(whole)


MODELS = {
    "untied, chunked loss": config(train={"loss_chunk": 20}),
    "tied, norms of heads, all computed again": config(
        {"tie_embeddings": True, "qk_norm": True, "head_dim": 6},
        {"activation_checkpointing": "full", "loss_chunk": 0},
    ),
    "adapter": config(
        train={"activation_checkpointing": "selective"},
        adapter={"rank": 3, "targets": ["k_proj", "o_proj", "up_proj"], "dropout": 0.1},
    ),
    "SGD": config(optimizer={"name": "sgd", "lr": 0.1, "nesterov": True}),
    "bfloat16": config(train={"dtype": "bfloat16"}),
}
COMPILED = {"compiled": config(train={"compile": True})}

Bits = list[tuple[str, str, str, str]]
"""Of each step: loss and norm in hexadecimal, and a digest of weights and moments, and their
fingerprint."""


def micro_batches(step: int, rank: int, world: int, turns: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[2, 5:] = IGNORE
    nothing = torch.zeros(LENGTH, dtype=torch.int64), torch.full((LENGTH,), IGNORE)
    return [
        MicroBatch(
            torch.stack([nothing[0] if n == PADDING else tokens[n, :-1] for n in rows]),
            torch.stack([nothing[1] if n == PADDING else targets[n] for n in rows]),
        )
        for rows in Slicing(ROWS, MICRO, rank, world, whole_slots=True, turns=turns).rows(0)
    ]


def built(asked: Config, degrees: MeshDegrees, choice: Choice) -> tuple[Transformer, SlotGradient]:
    dimensions = degrees.dimensions()
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    model = build_model(asked, VOCAB, CPU, mesh, choice)
    model.document_end = 7
    set_weights(model, asked)
    if asked.train.compile:
        compile_blocks(model)
    slots = -(-ROWS // MICRO)
    return model, SlotGradient(model, CPU, asked.train.seed, slots, mesh, choice)


def digest(table: Mapping[str, Tensor]) -> str:
    hashed = blake2b(digest_size=16)
    for name, tensor in sorted(table.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hashed.update(name.encode() + whole.detach().numpy().tobytes())
    return hashed.hexdigest()


def bits(asked: Config, on: str) -> Bits:
    """The bits of some steps on a mesh."""
    degrees = MeshDegrees(*map(int, on.removesuffix("*").split("x")))
    choice = Choice(reduce_once=not on.endswith("*"), keep_parameters=degrees.replicate > 1)
    model, gradient = built(asked, degrees, choice)
    share = dist.get_rank(), dist.get_world_size(), choice.turns(degrees.shard)
    optimizer = build_optimizer(model, asked.optimizer, any_shard=True)
    prints = StateFingerprint(model, optimizer, dist.get_rank(), dist.get_world_size())
    found = []
    for step in range(1, STEPS + 1):
        loss = gradient.add(micro_batches(step, *share), step)
        norm = update(model, optimizer, loss, 1e-2 / step, 0.5, any_shard=True)
        state = digest(capture(model, optimizer))
        told = text_of(int(summed(prints.local().sum())))
        found.append((loss.item().hex(), norm.item().hex(), state, told))
    return found


def main(out: Path, which: str, meshes: list[str]) -> None:
    """A rank: every model on every mesh; rank 0 keeps the bits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = COMPILED if which == "compiled" else MODELS
    found = {(name, text): bits(asked, text) for name, asked in models.items() for text in meshes}
    if dist.get_rank() == 0:
        torch.save(found, out)
    print(f"rank {dist.get_rank()} has seen it all", flush=True)
    dist.barrier()
    os._exit(0)  # as every rank of kempner: see sharded_gradients.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
