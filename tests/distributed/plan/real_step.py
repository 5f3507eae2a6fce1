"""Training steps on real memory, and what they held at their peak: by torch, and by Linux."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from kempner.config.sections import Config
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.model.spec.communication import Choice
from kempner.training.compute import recomputation
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.recomputation import Recomputation
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.corruption import CorruptionVerdict, StepPart

CPU = torch.device("cpu")
VOCAB = 3000
SIZES = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
NARROW = {"dim": 64, "n_layers": 4, "n_heads": 2, "ffn_dim": 128}
"""Whose activations need more than its weights."""
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


def two_any_world_steps(config: Config, mesh: DeviceMesh, doubted: StepPart | None) -> None:
    """As `two_steps`, with the same bits on any world. The second one is checked as if ranks
    differed in `doubted`, the gradient or the update; None: not at all."""
    train, choice = config.train, Choice(reduce_once=True)
    model = build_model(config, VOCAB, CPU, mesh, choice)
    optimizer = build_optimizer(model, config.optimizer, any_shard=True)
    slots = train.global_batch_size // train.micro_batch_size
    gradient = SlotGradient(model, CPU, 0, slots, mesh, choice)
    checks = Recomputation(gradient, optimizer, dist.new_group(backend="gloo"), hop=1)
    tokens = torch.randint(0, VOCAB, (train.micro_batch_size, train.seq_len))
    batches = [MicroBatch(tokens, tokens.clone())] * slots
    for step in (1, 2):
        checked = doubted is not None and step == 2
        loss = gradient.add(batches, step, checks.watch() if checked else None)
        if checked:
            with differing(doubted is StepPart.GRADIENT):
                if checks.check_gradient(step, lambda part: batches):
                    return
        update(model, optimizer, loss, rate=1e-3, max_norm=1.0, any_shard=True)
        if checked:
            with differing(doubted is StepPart.UPDATE):
                checks.check_update(loss, 1.0)


def differing(doubted: bool) -> AbstractContextManager[object]:
    """Two ranks differ, so that a third one has to compute; here it is the same one."""
    verdict = CorruptionVerdict(StepPart.GRADIENT, (0,), sure=False, slot=None)
    patched = patch.object(recomputation, "judge", lambda *_: verdict)
    return patched if doubted else nullcontext()


def allocated_at_peak(work: Callable[[], None]) -> int:
    """Bytes that torch's allocator gave out, by its profiler; of a process that is alone.

    Of several, Gloo's threads free memory, and the profiler does not see it.
    """
    gc.collect()  # or what an earlier model leaves is freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
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
