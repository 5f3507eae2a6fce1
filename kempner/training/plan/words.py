"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

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
    content = asdict(plan)
    content["memory"]["total"] = plan.memory.total
    content["time"]["total"] = plan.time.total
    content["time"]["bound"] = plan.time.bound
    return {**content, "fits": plan.fits}


def _world(plan: Plan) -> Iterator[str]:
    nodes = f"{plan.nodes} node" + ("s" if plan.nodes > 1 else "")
    yield f"{plan.world} ranks on {nodes}, one {plan.gpu.name} each: {plan.mesh}"
    yield f"communication: {plan.choice.describe()}: {plan.choice.reason}"


def _memory(plan: Plan) -> Iterator[str]:
    room = f"{_gb(plan.memory.total)} of {_gb(plan.limit)} (0.9 of the GPU)"
    yield f"memory of a rank at its peak: {room}"
    for kind in KINDS:
        if size := getattr(plan.memory, kind):
            yield f"  {_KINDS[kind]:<32}{_gb(size):>12}"


def _exchanges(plan: Plan) -> Iterator[str]:
    if not plan.exchanges:
        return
    yield "in a step, sent by each node       within it    to others   by itself"
    for exchange in plan.exchanges:
        operation, dimension = exchange.collective
        name = f"{operation.replace('_', '-')} over {dimension}"
        within, between = _gb(exchange.traffic.within), _gb(exchange.traffic.between)
        yield f"  {name:<30}{within:>12} {between:>12} {exchange.seconds:>9.3g} s"


def _time(plan: Plan) -> Iterator[str]:
    time = plan.time
    speed = f"{plan.tokens_per_second:,.0f} tokens/s, MFU {_share(plan.mfu)}"
    yield f"a step takes {time.total:.3g} s: {speed}"
    for part, words in _PARTS.items():
        if seconds := getattr(time, part):
            yield f"  {words:<40}{seconds:>9.3g} s {_share(seconds / time.total):>6}"
    yield f"  bound by {_BOUND[time.bound]}; a rank computes {plan.flops / 1e12:,.0f} TFLOP"


def _saves(plan: Plan) -> Iterator[str]:
    saves = plan.saves
    yield (
        f"a checkpoint has {_gb(saves.bytes)}, is written in {saves.seconds:.3g} s, and holds "
        f"training up for {saves.pause:.2g} s"
    )
    yield (
        f"  save about every {saves.interval / 60:.3g} min, {saves.interval_steps:,} steps "
        "(Young's formula)"
    )


def _traced(plan: Plan) -> Iterator[str]:
    buffers = sum(exchange.buffers for exchange in plan.exchanges)
    alike = plan.flops == plan.flops_by_formula and buffers == plan.buffers_by_formula
    yield "traced: memory, operations and collectives of the step, on tensors without memory;"
    if alike:
        yield "  FLOPs and bytes sent equal those of the formulas in kempner/model/spec"
    else:
        yield (
            f"  the formulas say {plan.flops_by_formula:,} FLOPs instead of {plan.flops:,}, and "
            f"{plan.buffers_by_formula:,} bytes sent instead of {buffers:,}: please report it"
        )
    for note in plan.notes:
        yield f"  {note}"


def _assumed(plan: Plan) -> Iterator[str]:
    given = plan.assumptions
    yield (
        f"assumed: {_share(given.compute_share)} of {plan.gpu.flops / 1e12:,.0f} TFLOP/s, "
        f"{_share(given.memory_share)} of {plan.gpu.memory_rate / 1e12:.2f} TB/s, "
        f"{_share(given.network_share)} of {plan.gpu.link_rate / 1e9:,.0f} GB/s to GPUs of the node"
    )
    yield (
        f"  and of {8 * given.network / 1e9:,.0f} Gb/s from a node to others ({plan.gpu.source});"
    )
    yield "  within a forward or a backward, what is sent is hidden by what is computed, but for"
    yield "  tensor groups; a tenth of the GPU is left to CUDA, NCCL and the allocator;"
    yield (
        f"  checkpoints are written at {given.storage / 1e9:g} GB/s and copied to the host at "
        f"{given.to_host / 1e9:g} GB/s a rank;"
    )
    yield f"  a node fails once in {given.node_failure / 86_400:.0f} days"


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits:
        yield f"fits: {_gb(plan.limit - plan.memory.total)} of a GPU's memory are left"
    else:
        yield f"does not fit: {plan.advice}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"
