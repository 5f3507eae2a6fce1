"""What a step costs with `train.same_on_any_world`, beside the two reductions of other runs.

    python benchmarks/any_world.py [--ranks 1 2 3] [--size small] [--rounds 30] [--steps 4] [--cpu]

The ranks of one world train copies of a model, one after the other, some steps of each: gradients
reduced after every micro batch, once a step, and along the tree, sent once a step or, `in turn`,
slot by slot. The order changes from round to round. `tree` and `in turn` are medians of the ratios,
round by round, to the one of the first two that is faster in this world; `again` is that one's
second copy, as a control. `printed` is `tree` with the fingerprint of weights and moments after
each step, and `fingerprint` its ratio to `tree`. `watched` is `tree` where each step looks whether
memory is as it was left, `checked` where other ranks compute each step again; `integrity` is the
ratio to `tree` of steps of which one in a hundred is checked. `sums` is the number of sums that a
rank sends at most in a step, where a reduction sends one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from kempner.cluster.network.ports import free_port
from kempner.config.sections import Config
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.model.spec.communication import Choice
from kempner.model.spec.slot_tree import most_kept, slots_of, subtrees
from kempner.training.compute.fingerprint import StateFingerprint, summed
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.recomputation import Recomputation, StateChain
from kempner.training.compute.slot_gradient import SlotGradient

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/model", "kempner/training")
ROWS, MICRO, VOCAB = 16, 2, 257
SIZES = {
    "small": {"dim": 128, "n_layers": 5, "n_heads": 4, "ffn_dim": 384, "max_seq_len": 128},
    "wide": {"dim": 512, "n_layers": 4, "n_heads": 8, "ffn_dim": 1408, "max_seq_len": 256},
}
"""1.1 and 13 million parameters; a sequence is as long as it may be."""
TRAIN = {"global_batch_size": ROWS, "micro_batch_size": MICRO, "threads": 1}
WARM_UP = 2
ONCE = Choice(reduce_once=True)
WAYS = ("micro batch", "step", "again", "tree", "in turn", "printed", "watched", "checked")

CPU = "ANY_WORLD_CPU_SECONDS"

Turn = Callable[[], None]


def batches_of(size: str, turns: int) -> list[MicroBatch]:
    """This rank's micro batches of a step, of any content."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = Slicing(ROWS, MICRO, rank, world, whole_slots=True, turns=turns).rows(0)
    tokens = torch.randint(0, VOCAB, (len(rows), MICRO, SIZES[size]["max_seq_len"]))
    return [MicroBatch(each, each.clone()) for each in tokens]


def turn_of(way: str, mesh: DeviceMesh, choice: Choice, size: str) -> Turn:
    """A model of its own, and what makes a step of it."""
    tree, cpu = way in WAYS[3:], torch.device("cpu")
    train = {**TRAIN, "seq_len": SIZES[size]["max_seq_len"]}
    config = Config.model_validate(
        {"model": SIZES[size], "train": train | ({"same_on_any_world": True} if tree else {})}
    )
    model = build_model(config, VOCAB, cpu, mesh, choice)
    optimizer = build_optimizer(model, config.optimizer, any_shard=tree)
    gradient = (
        SlotGradient(model, cpu, 0, ROWS // MICRO, mesh, choice)
        if tree
        else StepGradient(model, cpu, 0, dist.get_rank(), choice=choice)
    )
    batches = batches_of(size, choice.turns(mesh.size()) if tree else 1)

    prints = StateFingerprint(model, optimizer, dist.get_rank(), dist.get_world_size())
    if way in WAYS[-2:]:
        assert isinstance(gradient, SlotGradient)
        return checked_turn(gradient, optimizer, batches, every_step=way == WAYS[-1])

    def turn() -> None:
        loss = gradient.add(batches, 1)
        norm = update(model, optimizer, loss, 1e-3, 1.0, any_shard=tree)
        if way == "printed":
            summed(prints.local().sum()).item()
        norm.item()

    return turn


def checked_turn(
    gradient: SlotGradient, optimizer: Optimizer, batches: list[MicroBatch], every_step: bool
) -> Turn:
    """A step that watches memory, and with `every_step` is computed again by another rank."""
    chain = StateChain(gradient.model, optimizer)
    assert dist.group.WORLD is not None
    again = Recomputation(gradient, optimizer, dist.group.WORLD, hop=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    told = [torch.zeros(2, dtype=torch.bool) for _ in range(world)]
    of_ranks: list[list[MicroBatch]] = [[] for _ in range(world)]
    dist.all_gather_object(of_ranks, batches)
    of_partner = of_ranks[(rank - 1) % world]

    def turn() -> None:
        loss = gradient.add(batches, 1, again.watch() if every_step else None)
        dist.all_gather(told, torch.tensor([chain.broken, every_step]))
        assert not any(one[0] for one in told)
        assert not every_step or again.check_gradient(1, lambda _: of_partner) is None
        norm = update(gradient.model, optimizer, loss, 1e-3, 1.0, any_shard=True)
        assert not every_step or again.check_update(loss, 1.0) is None
        chain.remember()
        norm.item()

    return turn


def seconds(turn: Turn, steps: int) -> float:
    dist.barrier()
    began = clock()
    for _ in range(steps):
        turn()
    dist.barrier()
    return (clock() - began) / steps


def clock() -> float:
    return time.process_time() if os.environ.get(CPU) else time.perf_counter()


def ways_of(world: int) -> tuple[str, ...]:
    """A rank that is alone has none that could check it."""
    return WAYS if world > 1 else WAYS[:-2]


def be_rank(size: str, rounds: int, steps: int) -> None:
    """A rank; the first one prints the seconds of a step, by way, one list for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    each = Choice()
    choices = dict(zip(WAYS, (each, ONCE, each, ONCE, each, ONCE, ONCE, ONCE), strict=True))
    ways = ways_of(world)
    turns = {way: turn_of(way, mesh, choices[way], size) for way in WAYS[:2]}
    for turn in turns.values():
        seconds(turn, WARM_UP)
    first = torch.tensor([seconds(turns[way], steps) for way in WAYS[:2]])
    dist.all_reduce(first)  # so that all ranks choose alike
    choices["again"] = each if first[0] < first[1] else ONCE
    turns |= {way: turn_of(way, mesh, choices[way], size) for way in ways[2:]}
    took: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways[2:]:
        seconds(turns[way], WARM_UP)
    for number in range(rounds):
        for way in random.Random(number).sample(ways, len(ways)):
            took[way].append(seconds(turns[way], steps))
    if rank == 0:
        print(json.dumps(took), flush=True)
    dist.barrier()
    os._exit(0)


def measure(world: int, size: str, rounds: int, steps: int, cpu: bool) -> dict[str, list[float]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1", "any world"))}
    command = [sys.executable, __file__, "--rank", "--size", size]
    command += ["--rounds", str(rounds), "--steps", str(steps)]
    if cpu:
        place[CPU] = "1"
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "WORLD_SIZE": str(world), "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(world)
    ]
    said, _ = ranks[0].communicate()
    if any(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    found: dict[str, list[float]] = json.loads(said)
    return found


def row_of(world: int, size: str, took: dict[str, list[float]]) -> dict[str, object]:
    faster = min(WAYS[:2], key=lambda way: statistics.median(took[way]))
    row: dict[str, object] = {"ranks": world, "size": size, "faster": faster}
    row["its step, ms"] = 1e3 * statistics.median(took[faster])
    for way in ways_of(world):
        ratios = [one / other for one, other in zip(took[way], took[faster], strict=True)]
        row[way] = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        if way in WAYS[3:]:
            row[f"{way}, quartiles"] = [low, high]
    pairs = zip(took["printed"], took["tree"], strict=True)
    row["fingerprint"] = statistics.median(one / other for one, other in pairs)
    if world > 1:
        threes = zip(took["watched"], took["checked"], took["tree"], strict=True)
        shares = [(0.99 * watched + 0.01 * checked) / tree for watched, checked, tree in threes]
        row["integrity"] = statistics.median(shares)
    slots = ROWS // MICRO
    row["sums"] = max(len(subtrees(slots_of(slots, rank, world))) for rank in range(world))
    row["kept"] = most_kept(slots, world)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4, help="of a copy in a round")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU seconds, for a machine with other work"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    records.add_option(parser)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(arguments.size, arguments.rounds, arguments.steps)
    for world in arguments.ranks:
        took = measure(world, arguments.size, arguments.rounds, arguments.steps, arguments.cpu)
        found = row_of(world, arguments.size, took)
        found |= {"counts": "CPU seconds"} if arguments.cpu else {}
        records.result(arguments.record, "same on any world", PROVES, [found], "ranks", "size")


if __name__ == "__main__":
    main()
