"""With `train.same_on_any_world`, and `Slots`, results are the same bits on any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from random import Random

import pytest
import torch
from drilling import SEED, note
from harness import KEMPNER, Job, Run, drills, launch

from kempner.checkpoint.compare import open_kempner, pairs
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).parents[1] / "programs/any_world.py"
OF_SLOTS = PROGRAM.with_name("slots_on_meshes.py")
WORLDS = ["1x1", "1x2 1x2* 2x1", "1x3 1x3* 3x1"]
LARGER = ["1x1", "1x4 1x4* 2x2 2x2* 4x1", "1x5 1x5*", "2x3 2x3* 3x2*", "1x8 1x8* 2x4"]

LARGER_OF_SLOTS = ["1x2 2x1", "1x4 2x2", "1x5", "1x8 2x4"]


def ranks(meshes: str) -> int:
    """How many there are, by the first mesh."""
    replicas, shards = map(int, meshes.split()[0].removesuffix("*").split("x"))
    return replicas * shards


@pytest.mark.parametrize(
    ("models", "worlds"), [("eager", WORLDS), *drills(("eager", LARGER), ("compiled", WORLDS))]
)
def test_losses_norms_weights_and_moments_are_the_same_bits(
    models: str, worlds: list[str], tmp_path: Path
) -> None:
    """Replicated, sharded, and both, sent once a step or slot by slot; also where no tree's half
    has whole ranks, or a rank has no slot. With dropout, documents, chunks of the loss, blocks that
    compute again, and an adapter."""
    found: dict[tuple[str, str], object] = {}
    for meshes in worlds:
        out = tmp_path / f"{meshes[:3]}.pt"
        launch(PROGRAM, ranks(meshes), out, models, *meshes.split(), deadline=500)
        found |= torch.load(out)
    assert len(found) >= len(worlds)
    for (name, mesh), bits in found.items():
        assert bits == found[name, "1x1"], f"{name} on {mesh}"


@pytest.mark.parametrize(
    ("loops", "steps", "worlds"),
    [
        ("eager", 4, ["1x1 plain", "1x3 3x1"]),
        *drills(
            ("eager", 4, ["1x1", *LARGER_OF_SLOTS]),
            ("AdamW", 40, ["1x1", *(f"{world} plain" for world in LARGER_OF_SLOTS)]),
            ("compiled", 4, ["1x1 plain", "1x2", "1x3"]),
        ),
    ],
)
def test_a_loop_with_slots_computes_the_same_bits_on_any_mesh(
    loops: str, steps: int, worlds: list[str], tmp_path: Path
) -> None:
    """Loss, norm, weights and moments; sharded, replicated, both, and without `fully_shard`, where
    all is float32. With dropout, a tied weight, weights that do not train or that no slot uses,
    activation checkpointing, mixed precision, and worlds in which ranks have fewer slots."""
    found: dict[tuple[str, str], object] = {}
    for number, meshes in enumerate(worlds):
        out = tmp_path / f"{number}.pt"
        launch(OF_SLOTS, ranks(meshes), out, loops, steps, *meshes.split(), deadline=900)
        found |= torch.load(out)
    for (name, mesh), bits in found.items():
        if mesh != "plain" or name != "bfloat16":  # which is that of `fully_shard`
            assert bits == found[name, "1x1"], f"{name} on {mesh}"


STEPS = 30
PURE = (
    "--train.same_on_any_world=true",
    "--checkpoint.interval=5",
    "--train.global_batch_size=10",
    "--eval.interval=10",
    "--eval.max_batches=2",
)


def test_stops_a_kill_and_other_worlds_change_no_bit(run: Run, reference: Run) -> None:
    """Five slots; from one rank to three, of which one is killed, to two replicas."""
    asked = (*PURE, f"--train.max_steps={STEPS}", f"--eval.dataset_path={run.data}")
    reference.complete(2, *asked)
    job = run.supervise(1, *asked)
    run.reach(6, job)
    job.signal()
    assert job.wait() == 75, job.output()
    job = run.supervise(3, *asked)
    run.reach(12, job)
    os.kill(run.ready_pid(run.attempt(), 1, job), signal.SIGKILL)
    run.reach(20, job)
    job.signal()
    assert job.wait() == 75, job.output()
    run.complete(2, *asked, "--parallelism.data_parallel_replicate_degree=2")
    assert_equal(run, reference, STEPS)
    ours, theirs = (
        {e["step"]: e["loss"] for e in each.events("evaluated")} for each in (run, reference)
    )
    assert ours == theirs
    assert traced(reference, 1) == traced(reference, 3), "and what every module computed"


def traced(run: Run, world: int) -> list[dict[str, object]]:
    """What two steps of a run computed, as a replay on other ranks has it."""
    trace = run.folder / f"on-{world}.jsonl"
    options = ["--step", "27", "--to", "28", "--ranks", str(world), "--trace", str(trace)]
    subprocess.run([*KEMPNER, "replay", str(run.record.path), *options], check=True)
    lines = [line for line in read_lines(trace) if line.pop("rank", 0) is not None]
    assert len([line for line in lines if line["kind"] == "gradient"]) > 100
    return lines


def assert_equal(run: Run, reference: Run, steps: int) -> None:
    """Every loss, norm, weight and moment is the same, and every sample was taken once."""
    assert run.steps() == reference.steps()
    assert len(run.steps()) == steps
    assert run.taken() == list(range(10 * steps))
    last = [open_kempner(each.checkpoints / f"step-{steps:08}") for each in (run, reference)]
    assert [pair.name for pair in pairs(*last, on_bytes=lambda _: None) if not pair.equal] == []


MANY = 120
MESHES = ["1x1", "1x2", "2x1", "1x3", "1x4", "2x2", "1x5", "2x4", "8x1", "1x8"]
FAILURES = ["stop", "kill a rank", "kill all"]


def on(mesh: str, run: Run) -> Job:
    replicas, _ = map(int, mesh.split("x"))
    degree = f"--parallelism.data_parallel_replicate_degree={replicas}"
    asked = (*PURE, f"--train.max_steps={MANY}", f"--eval.dataset_path={run.data}", degree)
    return run.supervise(ranks(mesh), *asked)


@pytest.fixture
def undisturbed(reference: Run) -> Run:
    """On one rank."""
    assert on("1x1", reference).wait(300) == 0
    return reference


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_every_world_makes_the_same_run(undisturbed: Run, tmp_path: Path) -> None:
    for mesh in MESHES[1:]:
        run = Run(tmp_path / mesh, undisturbed.data)
        job = on(mesh, run)
        assert job.wait(300) == 0, job.output()
        assert_equal(run, undisturbed, MANY)
        note("any world", mesh=mesh, steps=MANY, failures=0, equal=True)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_a_run_with_ten_failures_in_other_worlds_is_the_undisturbed_one(
    run: Run, undisturbed: Run
) -> None:
    """Each failure at a random step, in a random world after the last one."""
    random = Random(SEED)
    failing = sorted(random.sample(range(2, MANY - 30), 10))
    hows = [*FAILURES, *random.choices(FAILURES, k=len(failing) - len(FAILURES))]
    random.shuffle(hows)
    meshes = random.sample(MESHES, len(MESHES))
    job, mesh = on(meshes[0], run), meshes[0]
    for step, how, following in zip(failing, hows, [*meshes[1:], "1x2"], strict=True):
        run.reach(max([step, *(made + 1 for made in run.steps())]), job)  # a new one
        if how == "kill a rank":
            victim = run.ready_pid(run.attempt(), random.randrange(ranks(mesh)), job)
            os.kill(victim, signal.SIGKILL)
            continue
        job.signal(signal.SIGTERM if how == "stop" else signal.SIGKILL)
        assert job.wait() == (75 if how == "stop" else -signal.SIGKILL), job.output()
        job, mesh = on(following, run), following
    assert job.wait(300) == 0, job.output()
    assert_equal(run, undisturbed, MANY)
    worlds = len({event["ranks"] for event in run.events("attempt_started")})
    note("any world", mesh="random", steps=MANY, failures=len(failing), worlds=worlds, equal=True)
