"""The section `[parallelism]`: how a world of ranks is divided, and what they send each other."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kempner.config.section import Key, PositiveInt, Section

Degree = Annotated[int, Field(ge=-1)]


class ParallelismSection(Section):
    """How the ranks share the work, a mesh of replicate x shard x tensor ranks, and what they send
    each other for it."""

    data_parallel_replicate_degree: Annotated[Degree, Key("groups of ranks", 2)] = 1
    """Groups of ranks that each hold the whole model between them, on other samples (HSDP); -1 is
    what the other degrees leave."""
    data_parallel_shard_degree: Annotated[Degree, Key("ranks", 8)] = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 is what
    the other degrees leave."""
    tensor_parallel_degree: Annotated[PositiveInt, Key("ranks", 4)] = 1
    """Ranks, next to each other on one node, that compute each layer together on the same samples
    (tensor and sequence parallel)."""
    reduce_gradients: Annotated[
        Literal["auto", "step", "micro_batch"],
        Key(
            values={
                "auto": "what sends least and fits the memory of the GPU; on CPUs micro_batch",
                "step": "once a step; until then a rank keeps them whole, in float32",
                "micro_batch": "after every micro batch",
            }
        ),
    ] = "auto"
    """When gradients are summed over the ranks that share the parameters."""
    reshard_after_forward: Annotated[
        Literal["auto", "always", "never"],
        Key(
            values={
                "auto": "what sends least and fits the memory of the GPU; on CPUs always",
                "always": "freed after the forward of their block, gathered again for its backward",
                "never": "kept until the last backward of the step",
            }
        ),
    ] = "auto"
    """Whether the gathered parameters of a block are freed before its backward."""

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
