"""Random numbers as a pure function of (seed, step, micro step, rank)."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, step: int, micro_step: int, rank: int) -> int:
    """A 63-bit seed: the first bytes of BLAKE2b over the four numbers."""
    text = f"kempner.rng.v1:{seed}:{step}:{micro_step}:{rank}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_rng(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed torch's global generators (CPU and CUDA), from which dropout draws."""
    torch.manual_seed(seed_for(seed, step, micro_step, rank))
