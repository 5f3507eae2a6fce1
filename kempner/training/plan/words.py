"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kempner.run.output.units import count, flops_text, seconds_text, size_text
from kempner.training.plan.plan import Plan
from kempner.training.plan.timeline import KINDS

_KINDS = {
    "parameters": "parameters, this rank's shard",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "activations": "activations",
    "loss": "logits and loss",
    "backward": "gradients on their way",
    "other": "other",
}
_PARTS = {
    "compute": "products of matrices",
    "memory": "reading and writing the GPU's memory",
    "within_node": "waiting for GPUs of the node",
    "between_nodes": "waiting for other nodes",
}
_BOUND = {
    "compute": "compute",
    "memory": "the GPU's memory rate",
    "within_node": "the links within a node",
    "between_nodes": "the network between nodes",
}


def to_text(plan: Plan) -> str:
    """All of it, to be read."""
    parts = (_world, _memory, _exchanges, _time, _saves, _traced, _assumed, _verdict)
    return "\n\n".join(lines for part in parts if (lines := "\n".join(part(plan))))


def to_json(plan: Plan) -> dict[str, Any]:
    """All of it, in bytes, seconds, FLOPs and per second."""
    content, time = asdict(plan), plan.speed.time
    content["room"]["memory"]["total"] = plan.room.memory.total
    content["speed"]["time"] |= {"total": time.total, "bound": time.bound}
    for exchange in content["exchanges"]:
        operation, dimension = exchange["collective"]
        exchange["collective"] = {"operation": operation, "dimension": dimension}
    return {"fits": plan.fits, **content}


def _world(plan: Plan) -> Iterator[str]:
    world = f"{count(plan.job.world, 'rank')} on {count(plan.job.nodes, 'node')}"
    yield f"{world}, one {plan.job.gpu.name} each: {plan.job.mesh}"
    yield f"communication: {plan.job.choice.describe()}"
    yield f"  {plan.job.choice.reason}"


def _memory(plan: Plan) -> Iterator[str]:
    room = f"{size_text(plan.room.memory.total)} of {size_text(plan.room.limit)} (0.9 of the GPU)"
    yield f"memory of a rank at its peak: {room}"
    for kind in KINDS:
        if size := getattr(plan.room.memory, kind):
            yield f"  {_KINDS[kind]:<32}{size_text(size):>12}"


def _exchanges(plan: Plan) -> Iterator[str]:
    if not plan.exchanges:
        return
    yield "in a step, sent by each node       within it    to others   by itself"
    for exchange in plan.exchanges:
        operation, dimension = exchange.collective
        name = f"{operation.replace('_', '-')} over {dimension}"
        within, between = size_text(exchange.traffic.within), size_text(exchange.traffic.between)
        yield f"  {name:<30}{within:>12} {between:>12} {seconds_text(exchange.seconds):>11}"


def _time(plan: Plan) -> Iterator[str]:
    time = plan.speed.time
    speed = f"{plan.speed.tokens_per_second:,.0f} tokens/s, MFU {_share(plan.speed.mfu)}"
    yield f"a step takes {seconds_text(time.total)}: {speed}"
    for part, words in _PARTS.items():
        if seconds := getattr(time, part):
            share = _share(seconds / time.total)
            yield f"  {words:<40}{seconds_text(seconds):>11} {share:>6}"
    yield f"  bound by {_BOUND[time.bound]}; a rank computes {flops_text(plan.flops.traced)}"
    if plan.speed.hint:
        yield f"  {plan.speed.hint}"


def _saves(plan: Plan) -> Iterator[str]:
    saves = plan.saves
    yield (
        f"a checkpoint has {size_text(saves.bytes)}, is written in {seconds_text(saves.seconds)}, "
        f"and holds training up for {seconds_text(saves.pause)}"
    )
    long = saves.interval >= 60
    every = f"{saves.interval / 60:.3g} min" if long else seconds_text(saves.interval)
    yield f"  save about every {every}, {count(saves.interval_steps, 'step')} (Young's formula)"


def _traced(plan: Plan) -> Iterator[str]:
    flops, sent = plan.flops, plan.sent
    yield "traced: memory, operations and collectives of the step, on tensors without memory"
    if flops.traced == flops.by_formula and sent.traced == sent.by_formula:
        yield "  FLOPs and bytes sent equal those of the formulas in kempner/model/spec"
    else:
        yield (
            f"  the formulas say {flops.by_formula:,} FLOPs instead of {flops.traced:,}, and "
            f"{sent.by_formula:,} bytes sent instead of {sent.traced:,}: please report it"
        )
    for note in plan.notes:
        yield f"  {note}"


def _assumed(plan: Plan) -> Iterator[str]:
    gpu, given = plan.job.gpu, plan.job.assumptions
    yield f"assumed, of peak figures ({gpu.source}):"
    yield f"  {_share(given.compute_share)} of {gpu.flops / 1e12:,.0f} TFLOP/s in bfloat16"
    yield f"  {_share(given.memory_share)} of {gpu.memory_rate / 1e12:.2f} TB/s in a GPU's memory"
    yield (
        f"  {_share(given.network_share)} of {gpu.link_rate / 1e9:,.0f} GB/s from a GPU to others "
        f"of its node, and of {8 * given.network / 1e9:,.0f} Gb/s from a node to others"
    )
    yield "  in a forward or a backward, computing hides all that is sent but in tensor groups"
    yield "  a tenth of a GPU's memory is for CUDA, NCCL and what the allocator cannot use"
    yield (
        f"  checkpoints are written at {given.storage / 1e9:g} GB/s, and copied to the host at "
        f"{given.to_host / 1e9:g} GB/s a rank"
    )
    yield f"  a node fails every {given.node_failure / 86_400:,.0f} days"


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits:
        left = size_text(plan.room.limit - plan.room.memory.total)
        yield f"fits: {left} of a GPU's memory are left"
    else:
        yield f"does not fit: {plan.room.advice}"


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"
