"""Compiles each block of a model with `torch.compile`, and keeps what that makes with the run."""

from __future__ import annotations

import logging
import os
import platform
from hashlib import blake2b
from pathlib import Path

import torch

from kempner.model.transformer import Transformer


def keep_compiled(cache: Path) -> None:
    """Have this process keep what it compiles in a folder, from which another start takes it.

    To be called before anything imports torch's compiler, which chooses a folder in /tmp as soon as
    it is imported, and names it in the environment. FSDP2 imports it, too.

    Args:
        cache: a folder that TORCHINDUCTOR_CACHE_DIR names takes precedence.
    """
    # Kernels are compiled for the processor (-march=native), by which torch does not look for them:
    # another one could end with an illegal instruction.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute() / _processor()))


def compile_blocks(model: Transformer) -> None:
    """Have every block compile what it computes when it first trains; evaluations compute as ever.

    Blocks are alike, so that one is compiled for all. It is compiled whole, or not at all: what
    shards and gathers a block stays outside, and so do the names of its parameters. What is made is
    kept where `keep_compiled` says.
    """
    import torch._inductor.config as inductor  # imports torch's compiler

    # In this process: a pool of compiling processes could outlive a rank that is killed, and for
    # one block it gains little.
    inductor.compile_threads = 1
    # It warns of operations in place where "selective" computes again; a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in model.blocks:
        block.compiled = torch.compile(block.run, fullgraph=True, dynamic=False)


def _processor() -> str:
    """Short for what this machine's processor can do."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return blake2b(line.encode(), digest_size=4).hexdigest()
    return platform.machine()
