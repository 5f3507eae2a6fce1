"""Makes the table of docs/communication.md from the formulas in kempner/model/spec.

python scripts/docs/communication_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from kempner.config.loading import load
from kempner.model.spec.communication import (
    EACH_MICRO_BATCH,
    Choice,
    node_traffic,
    step_buffers,
)
from kempner.model.spec.memory import USUAL_GPU, Situation, choose, estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "communication.md"
BEGIN, END = "<!-- Made by scripts/docs/communication_page.py. -->\n", "<!-- The end of it. -->\n"
NODES, GPUS = (1, 4, 8, 32), 4
HEAD = """\
| nodes | replicate x shard | reduce gradients | reshard | memory | to other nodes | in a node |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    return 0


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + table() + END + after


def table() -> str:
    """What 7B needs and sends, on nodes of 4 GPUs of 80 GB."""
    lines = []
    for nodes in NODES:
        meshes = [MeshDegrees(shard=nodes * GPUS)]
        if nodes > 1:
            meshes.append(MeshDegrees(replicate=nodes, shard=GPUS))
        for mesh in meshes:
            lines += [row(nodes, mesh, chosen=False), row(nodes, mesh, chosen=True)]
    return HEAD + "".join(lines)


def row(nodes: int, mesh: MeshDegrees, chosen: bool) -> str:
    config = load(ROOT / "configs" / "train" / "7b.toml")
    shape = Shape.of(config.model, config.model.vocab_size or 0)
    micro_batches = config.train.global_batch_size // mesh.world
    situation = Situation(shape, mesh, GPUS, micro_batches, compute_bytes=2, gpu_memory=USUAL_GPU)
    choice = choose(config, situation) if chosen else EACH_MICRO_BATCH
    buffers = step_buffers(shape, mesh, choice, micro_batches=micro_batches, compute_bytes=2)
    traffic = node_traffic(buffers, mesh, GPUS)
    memory = estimate_memory(config, shape, mesh, situation.compute_bytes, choice).total
    cells = [
        str(nodes),
        f"{mesh.replicate} x {mesh.shard}",
        *words(choice),
        f"{memory / 1e9:,.0f} GB",
        f"{traffic.between / 1e9:,.1f} GB" if nodes > 1 else "",
        f"{traffic.within / 1e9:,.0f} GB",
    ]
    if chosen:
        cells = [f"**{cell}**" if cell else "" for cell in cells]
    return f"| {' | '.join(cells)} |\n"


def words(choice: Choice) -> tuple[str, str]:
    return (
        "step" if choice.reduce_once else "micro_batch",
        "never" if choice.keep_parameters else "always",
    )


if __name__ == "__main__":
    sys.exit(main())
