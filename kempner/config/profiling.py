"""What is traced of the training, and by whom."""

from __future__ import annotations

from kempner.config.section import NonNegativeInt, PositiveInt, Section


class ProfilingSection(Section):
    """Traces of chosen steps; `kempner profile` asks for more while the run goes on."""

    steps: list[PositiveInt] = []  # noqa: RUF012 - pydantic copies it
    """Steps at which a trace begins; none by default."""
    length: PositiveInt = 2
    """Steps in a trace."""
    ranks: list[NonNegativeInt] = [0]  # noqa: RUF012 - pydantic copies it
    """Ranks that write a trace of those steps, each its own."""
    memory: bool = False
    """Write what is allocated on the GPU, too: a snapshot for pytorch.org/memory_viz."""
    keep: PositiveInt = 8
    """Newest traces of a rank that stay."""
