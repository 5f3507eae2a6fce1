"""What is traced of the training, and by whom."""

from __future__ import annotations

from typing import Annotated

from kempner.config.section import Key, NonNegativeInt, PositiveInt, Section


class ProfilingSection(Section):
    """Traces of chosen steps; `kempner profile` asks for more while the run goes on."""

    steps: Annotated[list[PositiveInt], Key("step numbers", [100, 5000])] = []  # noqa: RUF012 - pydantic copies it
    """Steps at which a trace begins; none by default."""
    length: Annotated[PositiveInt, Key("steps", 5)] = 2
    """Steps in a trace."""
    ranks: Annotated[list[NonNegativeInt], Key("rank numbers", [0, 8])] = [0]  # noqa: RUF012 - pydantic copies it
    """Ranks that write a trace of those steps, each its own."""
    memory: bool = False
    """Write what is allocated on the GPU, too: a snapshot for pytorch.org/memory_viz."""
    keep: Annotated[PositiveInt, Key("traces", 20)] = 8
    """Newest traces of a rank that stay."""
