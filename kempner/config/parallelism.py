"""The section `[parallelism]`: how a world of ranks is divided, and what they send each other."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kempner.config.section import PositiveInt, Section

Degree = Annotated[int, Field(ge=-1)]


class ParallelismSection(Section):
    """How the ranks share the work, a mesh of replicate x shard x tensor ranks, and what they send
    each other for it."""

    data_parallel_replicate_degree: Degree = 1
    """Groups of ranks that each hold the whole model between them, on other samples (HSDP); -1 is
    what the other degrees leave."""
    data_parallel_shard_degree: Degree = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 is what
    the other degrees leave."""
    tensor_parallel_degree: PositiveInt = 1
    """Ranks, next to each other on one node, that compute each layer together on the same samples
    (tensor and sequence parallel)."""
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are summed over the ranks that share the parameters: once a step, for which a
    rank keeps them whole in float32 until then, or after every micro batch. auto sends least of
    what fits the GPU's memory; on CPUs it is micro_batch."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """always: a block's parameters are freed after its forward, and gathered again for its
    backward. never: they are kept until the step's last backward. auto sends least of what fits
    the GPU's memory; on CPUs it is always."""

    @model_validator(mode="after")
    def _leaves_one_open(self) -> Self:
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if 0 in (replicate, shard):
            raise ValueError("a degree of 0 leaves no ranks; write 1, or -1 for what is left")
        if replicate == shard == -1:
            raise ValueError(
                "only one of data_parallel_replicate_degree and data_parallel_shard_degree can be "
                "-1, what is left"
            )
        return self
