"""How a mixture of experts can be spread, and what a rank then needs: `kempner plan MODEL`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from kempner.cli.progress import busy
from kempner.model.spec.experts import Division, ExpertModel, divide_experts, fits
from kempner.model.spec.hardware import Gpu, find_gpu
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode


def divide(model: Path, world: int, gpu: str, as_json: bool) -> int:
    """Print what memory a rank needs, by the degree of expert parallelism; the exit code.

    `model` is the config.json of a Hugging Face model, or its folder.
    """
    card = find_gpu(gpu)
    with busy("importing torch and building the model without its weights"):
        from kempner.training.plan.expert_counts import count_experts

        counted = count_experts(model)
    ways = divide_experts(counted, world)
    if as_json:
        typer.echo(json.dumps(_to_json(counted, ways, card), indent=2))
    else:
        typer.echo(_to_text(counted, ways, card, world))
    possible = any(fits(way.weights, card.memory) for way in ways)
    return ExitCode.COMPLETED if possible else ExitCode.CRASHED


def _to_json(model: ExpertModel, ways: Sequence[Division], gpu: Gpu) -> dict[str, object]:
    rows = [
        asdict(way)
        | {
            "fits": {
                "weights": fits(way.weights, gpu.memory),
                "sharded": fits(way.sharded, gpu.memory),
                "whole": fits(way.whole, gpu.memory),
            }
        }
        for way in ways
    ]
    return {"model": asdict(model), "gpu": gpu.name, "ways": rows}


def _to_text(model: ExpertModel, ways: Sequence[Division], gpu: Gpu, world: int) -> str:
    lines = [
        f"{model.parameters / 1e9:,.1f} billion parameters, {model.expert_parameters / 1e9:,.1f} "
        f"billion of them in experts: {model.experts} in a layer, {model.layers} layers",
        f"{count(world, 'rank')}, one {gpu.name} of {gpu.memory / 1e9:.0f} GB each. GB of a rank, "
        "without activations and caches; * fits",
        "",
        f"{'EP':>5}{'experts':>9}{'bf16 weights':>15}{'training, sharded':>20}"
        f"{'training, whole':>18}",
    ]
    for way in ways:
        row = f"{way.expert_parallel:>5}{way.experts:>9}"
        for width, size in ((15, way.weights), (20, way.sharded), (18, way.whole)):
            mark = "*" if fits(size, gpu.memory) else " "
            row += f"{size / 1e9:>{width - 1},.1f}{mark}"
        lines.append(row.rstrip())
    return "\n".join(lines)
