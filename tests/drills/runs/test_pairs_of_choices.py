"""Whatever a run has chosen, stops and a killed rank change nothing.

Every pair of choices is in one of the combinations: mesh, model, what is compiled, computed again,
sent, kept and accumulated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from drilling import SEED, note
from harness import Run, drills

pytestmark = pytest.mark.timeout(600)

STEPS = 60
MESHES = {
    "alone": (1, 1, 1),
    "shard 2": (1, 2, 1),
    "replicate 2": (2, 1, 1),
    "tensor 2": (1, 1, 2),
    "replicate 2, shard 2": (2, 2, 1),
    "shard 2, tensor 2": (1, 2, 2),
    "replicate 2, tensor 2": (2, 1, 2),
}
"""Degrees: replicate, shard, tensor."""

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "mesh": dict.fromkeys(MESHES, ()),
    "model": {
        "Llama": (),
        "Qwen": ("--model.qk_norm=true", "--model.tie_embeddings=true", "--model.head_dim=32"),
    },
    "compile": {"compiled": ("--train.compile=true",), "as written": ()},
    "again": {
        "nothing": (),
        "some": ("--train.activation_checkpointing=selective",),
        "every second block": (
            "--train.activation_checkpointing=full",
            "--train.activation_checkpointing_every=2",
        ),
    },
    "loss": {"in chunks": ("--train.loss_chunk=24",), "at once": ("--train.loss_chunk=0",)},
    "gradients": {
        "once a step": ("--parallelism.reduce_gradients=step",),
        "every micro batch": ("--parallelism.reduce_gradients=micro_batch",),
    },
    "parameters": {
        "kept": ("--parallelism.reshard_after_forward=never",),
        "freed": ("--parallelism.reshard_after_forward=always",),
    },
    "documents": {"masked": ("--data.document_mask=true",), "seen": (), "chats": ()},
    "micro batch": {"1": ("--train.micro_batch_size=1",), "2": ()},
}

IN_ALL = (
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=7",
    "--model.n_kv_heads=2",
    "--model.vocab_multiple=2",
)
PARTS = 5
"""Combinations that `make check` takes; `make long` takes them all."""


def combinations() -> list[dict[str, str]]:
    """A value of every choice, so that each pair of values is in one of them."""
    rows = AllPairs([list(values) for values in CHOICES.values()])
    found = [dict(zip(CHOICES, row, strict=True)) for row in rows]
    assert len(found) <= 40
    return found


def chosen(combination: Mapping[str, str]) -> tuple[int, list[str]]:
    """Number of ranks, and overrides."""
    replicate, shard, tensor = MESHES[combination["mesh"]]
    options = [
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.tensor_parallel_degree={tensor}",
        *(option for name, value in combination.items() for option in CHOICES[name][value]),
    ]
    return replicate * shard * tensor, [*IN_ALL, *options]


def cases() -> list[Any]:
    """Compiling takes half a minute each time, so that only the drill does it."""
    found = combinations()
    quick = [each for each in found if each["compile"] == "as written"][:PARTS]
    return [*quick, *drills(*(each for each in found if each not in quick))]


@pytest.mark.parametrize("combination", cases(), ids=lambda found: ", ".join(found.values()))
def test_stops_and_a_kill_change_nothing(
    run: Run, reference: Run, shared: Path, chats: tuple[str, ...], combination: dict[str, str]
) -> None:
    world, options = chosen(combination)
    options += chats if combination["documents"] == "chats" else ()
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(shared / "compiled")}  # once for all, not per run
    job = reference.supervise(world, *options, **compiled)
    assert job.wait(400) == 0, job.output()

    draw = random.Random(f"{SEED} {combination}")
    stopped_on: list[int] = []
    for moment in sorted(draw.sample(range(2, 36), 3)):
        job = run.supervise(world, *options, **compiled)
        run.ready_pid(len(run.jobs), world - 1, job)
        run.reach(max(moment, *(step + 1 for step in stopped_on), 1), job)
        job.signal()
        assert job.wait() == 75, job.output()
        stopped_on.append(run.latest())
    rank, step = draw.randrange(world), STEPS - draw.randrange(1, 6)
    kill = f"kill rank {rank} at step {step} attempt {1 + len(run.jobs)}"
    job = run.supervise(world, *options, KEMPNER_FAULTS=kill, **compiled)
    assert job.wait(400) == 0, job.output()

    assert [e["step"] for e in run.events("stopped")] == stopped_on
    ended = [e["culprit"] for e in run.events("attempt_ended") if e["culprit"] is not None]
    assert ended == [rank]
    assert run.steps() == reference.steps()
    assert run.weights() == reference.weights()
    assert list(run.steps()) == list(range(1, STEPS + 1))
    assert run.taken() == list(range(8 * STEPS))
    note("pair of choices", **combination, stopped_on=stopped_on, killed=[rank, step])
