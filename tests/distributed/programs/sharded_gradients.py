"""One rank of a test: weights and gradients of sharded models. Usage: sharded_gradients.py OUT"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer

CPU = torch.device("cpu")
VOCAB = 257
ROWS, LENGTH = 6, 32


def config(dtype: str = "auto", checkpointing: str = "none", **model: object) -> Config:
    sizes = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 100, **model}
    train = {
        "seq_len": LENGTH,
        "seed": 5,
        "dtype": dtype,
        "loss_chunk": 20,
        "activation_checkpointing": checkpointing,
    }
    return Config(
        model=ModelSection.model_validate(sizes),
        train=TrainSection.model_validate(train),
    )


ASKED = {
    "grouped": config(),
    "summed every time": config(),
    "tied": config(tie_embeddings=True),
    "qwen": config(qk_norm=True, head_dim=16, vocab_multiple=16),
    "bfloat16": config(dtype="bfloat16"),
    "full": config(checkpointing="full"),
    "selective": config(checkpointing="selective", tie_embeddings=True),
}
Whole = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights and gradients of a model, put together from all ranks."""
Results = dict[str, Whole]


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def backward(model: Transformer, rows: Tensor) -> None:
    """Add the gradient of these rows' share of the global batch's mean loss."""
    loss = model(rows[:, :-1], rows[:, 1:])
    torch.autograd.backward(loss / (ROWS * LENGTH))


def main(out: str) -> None:
    """A rank: every configuration in turn; rank 0 keeps the whole weights and gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {
        name: gradient_of_rank(rank, world, asked, every_time=name == "summed every time")
        for name, asked in ASKED.items()
    }
    if rank == 0:
        torch.save(results, out)
    print(f"rank {rank} has seen it all", flush=True)
    dist.barrier()
    # Like every rank of kempner: a Gloo thread that drops its last tensor while the interpreter
    # winds down would abort the process.
    os._exit(0)


def gradient_of_rank(rank: int, world: int, config: Config, every_time: bool) -> Whole:
    """Two micro batches of this rank's rows, then an evaluation."""
    model = build_model(config, VOCAB, CPU, init_device_mesh("cpu", (world,)))
    assert isinstance(model, FSDPModule)
    weights = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    mine = batch().tensor_split(world)[rank]
    for number, rows in enumerate(mine.tensor_split(2)):
        model.set_requires_gradient_sync(every_time or number == 1)
        backward(model, rows)
    with torch.no_grad():
        model(mine[:, :-1])
    # What an optimizer or a checkpoint lists after an evaluation is still this rank's shards.
    return weights, {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    assert tensor.dtype is torch.float32
    return tensor.full_tensor()


if __name__ == "__main__":
    main(sys.argv[1])
