"""Random numbers as a pure function of (seed, step, micro step, rank)."""

from __future__ import annotations

import hashlib

import torch


class _Program:
    """What the program has seeded torch's generator with, which steps seed anew."""

    own: int | None = None
    replaced_by: int | None = None

    def seed(self) -> int:
        """The last seed that was not a step's."""
        now = torch.default_generator.initial_seed()
        if self.own is None or now != self.replaced_by:
            self.own = now
        return self.own


_program = _Program()


def program_seed() -> int:
    """What the program gave to `torch.manual_seed`; torch's default if nothing."""
    return _program.seed()


def given_seed() -> int | None:
    """The same, or None if the program seems to have given nothing: torch draws 64 bits then, the
    upper half of which is hardly ever zero."""
    seed = program_seed()
    return seed if seed < 1 << 32 else None


def seed_for(seed: int, step: int, micro_step: int, rank: int) -> int:
    """A 63-bit seed: the first bytes of BLAKE2b over the four numbers."""
    text = f"kempner.rng.v1:{seed}:{step}:{micro_step}:{rank}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_rng(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed torch's global generators (CPU and CUDA), from which dropout draws."""
    _program.seed()
    number = _program.replaced_by = seed_for(seed, step, micro_step, rank)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    elif torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)  # seeds them when they come to be
    # Not torch.manual_seed: where there is no CUDA it formats the stack for each kind of device,
    # which costs a step more than the vote does.
    torch.default_generator.manual_seed(number)
