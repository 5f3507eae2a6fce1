"""Training steps on real memory, and what they held at their peak: by torch, and by Linux."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from kempner.config.sections import Config
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.model.spec.communication import Choice
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update

CPU = torch.device("cpu")
VOCAB = 3000
SIZES = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
WIDE = {"dim": 512, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 1536}
"""Whose step takes some hundred megabytes, beside which a few of the process do not count."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""


def config(optimizer: str = "adamw", model: object = SIZES, **train: object) -> Config:
    """A small model, and a batch large enough for activations to matter."""
    asked = {"dtype": "float32", "seq_len": 128, "micro_batch_size": 2, **train}
    asked = {"global_batch_size": 64, **asked}
    sizes = {**model, "vocab_size": VOCAB}  # type: ignore[dict-item]
    return Config.model_validate({"model": sizes, "train": asked, "optimizer": {"name": optimizer}})


def two_steps(config: Config, mesh: DeviceMesh | None, choice: Choice, micro_steps: int) -> None:
    """The first two of a run: from the second on the optimizer has its state."""
    model = build_model(config, VOCAB, CPU, mesh, choice)
    optimizer = build_optimizer(model, config.optimizer)
    tokens = torch.randint(0, VOCAB, (config.train.micro_batch_size, config.train.seq_len))
    documents = torch.zeros_like(tokens, dtype=torch.int32) if config.data.document_mask else None
    batches = [MicroBatch(tokens, tokens.clone(), documents)] * micro_steps
    for step in (1, 2):
        loss = StepGradient(model, CPU, seed=0, rank=0, choice=choice).add(batches, step)
        update(model, optimizer, loss, rate=1e-3, max_norm=1.0)


def allocated_at_peak(config: Config, micro_steps: int) -> int:
    """Bytes that torch's allocator gave out, by its profiler; of a process that is alone.

    Of several, Gloo's threads free memory, and the profiler does not see it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        two_steps(config, None, Choice(), micro_steps)
    held = peak = 0
    result = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in result.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def resident_at_peak(
    config: Config, mesh: DeviceMesh | None, choice: Choice, micro_steps: int
) -> int:
    """Bytes that Linux counted for this process, beyond what it had before.

    Large blocks are mapped each by itself, so that they are given back when they are freed.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 32_768)
    two_steps(config, mesh, choice, 1)  # imports what is imported with the first step
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    two_steps(config, mesh, choice, micro_steps)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)
