"""What of a Trainer's settings cannot be resumed exactly, and is refused before the first step.

docs/integrations.md lists the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class Limit:
    """A setting that is refused where `holds` of a trainer; `why`, and what to do instead."""

    name: str
    holds: Callable[[Any], object]
    why: str


def _set(name: str) -> Callable[[Any], object]:
    return lambda trainer: getattr(trainer.args, name, False)


LIMITS = (
    Limit(
        "save_only_model",
        _set("save_only_model"),
        "its checkpoints hold no optimizer to go on with; leave it False",
    ),
    Limit(
        "auto_find_batch_size",
        _set("auto_find_batch_size"),
        "each start would find another batch size; give the one that fits",
    ),
    Limit(
        "enable_jit_checkpoint",
        _set("enable_jit_checkpoint"),
        "kempner answers the stop signals; leave it False",
    ),
    Limit(
        "ignore_data_skip",
        _set("ignore_data_skip"),
        "a resumed epoch would begin anew; leave it False, a place in a data set that has a length "
        "is found without reading what is before it",
    ),
    Limit(
        "sync_ref_model",
        _set("sync_ref_model"),
        "no checkpoint holds the reference model as it is then; leave it False",
    ),
    Limit(
        "use_vllm",
        _set("use_vllm"),
        "vLLM's random numbers are in no checkpoint; leave it False",
    ),
    Limit(
        "DeepSpeed",
        lambda trainer: getattr(trainer, "is_deepspeed_enabled", False),
        "its checkpoints were not tried under kempner; train without it",
    ),
    Limit(
        "FSDP",
        lambda trainer: getattr(trainer, "is_fsdp_enabled", False),
        "its checkpoints were not tried under kempner; train without it, or write the loop with "
        "survive",
    ),
)


def refuse_inexact(trainer: Any) -> None:
    """Raise `UsageError`, on all ranks alike, for a setting that could not be resumed exactly."""
    for limit in LIMITS:
        if limit.holds(trainer):
            raise UsageError(f"surviving(...): {limit.name} cannot be resumed exactly: {limit.why}")
