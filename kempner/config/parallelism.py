"""The section `[parallelism]`: what the ranks share, and what they send each other."""

from __future__ import annotations

from typing import Literal

from kempner.config.section import Section


class ParallelismSection(Section):
    """How the ranks share the model, and what they send each other for it."""

    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are summed over the ranks that share the parameters: once a step, for which a
    rank keeps them whole in float32 until then, or after every micro batch. auto sends least of
    what fits the GPU's memory; on CPUs it is micro_batch."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """always: a block's parameters are freed after its forward, and gathered again for its
    backward. never: they are kept until the step's last backward. auto sends least of what fits
    the GPU's memory; on CPUs it is always."""
