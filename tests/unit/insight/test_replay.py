"""Which steps of a run can be computed again, from where, and why not."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.config.model import ParallelismSection
from kempner.insight.replay import (
    RecordedRun,
    compare_steps,
    copy_trace,
    plan_replay,
    replay_config,
    start_of,
    trace_of,
)
from kempner.model.spec.mesh import resolve_degrees
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events import RolledBack

CONFIG: dict[str, Any] = {
    "train": {"max_steps": 100, "global_batch_size": 8, "seq_len": 32},
    "optimizer": {"lr": 0.1},
    "resilience": {"faults": ["kill rank 0 at step 3"], "spike_factor": 3.0},
    "hooks": {"on_failure": ["mail"]},
    "eval": {"interval": 5, "dataset_path": "held_out"},
}


def line(step: int, attempt: int = 1, **more: object) -> dict[str, object]:
    return {"step": step, "attempt": attempt, "loss": 1 / step, "tokens_per_second": 256.0} | more


def recorded(**changed: Any) -> RecordedRun:
    """Steps 11 to 20 of a run on two ranks, which has checkpoints of steps 5 and 10."""
    usual = RecordedRun(
        {step: line(step) for step in range(11, 21)}, (5, 10), ranks={1: 2}, configs={1: CONFIG}
    )
    return replace(usual, **changed)


def test_it_begins_at_the_checkpoint_before_and_takes_what_the_run_took(tmp_path: Any) -> None:
    plan = plan_replay(recorded(), 14, 17, None)
    assert (plan.start, plan.steps, plan.ranks, plan.seconds) == (10, 7, 2, 10.0)
    assert "last bits" not in plan.sentence
    assert "last bits may differ" in plan_replay(recorded(), 14, 17, 3).sentence
    assert "attempt 1 were deleted" in plan_replay(recorded(unkept=(1,)), 14, 17, None).sentence
    tables = replay_config(plan, tmp_path)
    assert tables["train"]["max_steps"] == 17
    assert tables["scheduler"]["total_steps"] == 100, "the learning rate is that of the long run"
    assert tables["resilience"] == {"spike_factor": 3.0}, "the faults were the world's"
    assert not {"hooks", "eval"} & tables.keys()


@given(st.integers(1, 12), st.sampled_from([1, 2, 3, 8]), st.sampled_from([-1, 1, 2]))
def test_ranks_that_cannot_make_the_mesh_shard_all_if_the_bits_allow_it(
    ranks: int, replicate: int, shard: int
) -> None:
    degrees = {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
    table = CONFIG | {"parallelism": degrees | {"reduce_gradients": "step"}}
    same = table | {"train": CONFIG["train"] | {"same_on_any_world": True}}
    fits = ranks % replicate == 0 and shard in (-1, ranks // replicate)
    with nullcontext() if fits else pytest.raises(UsageError, match=f"{ranks}"):
        assert plan_replay(recorded(configs={1: table}), 14, 14, ranks).config == table
    found = plan_replay(recorded(configs={1: same}), 14, 14, ranks).config["parallelism"]
    section = ParallelismSection.model_validate(found)
    assert resolve_degrees(section, ranks).replicate == (replicate if fits else 1)
    assert section.reduce_gradients == "step"


@given(
    st.sets(st.integers(0, 30)),
    st.integers(1, 30),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=3),
)
def test_no_rollback_is_between_the_checkpoint_and_the_steps(
    committed: set[int], first: int, more: int, rollbacks: list[tuple[int, int]]
) -> None:
    last = first + more
    start = start_of(sorted(committed), first)
    assert start == max((step for step in committed if step < first), default=None)
    back = [RolledBack(at=to + more, to=to, start=0, end=1) for to, more in rollbacks]
    lines = {step: line(step) for step in range((start or 0) + 1, last + 1)}
    run = recorded(lines=lines, committed=sorted(committed), rollbacks=back)
    affected = any((start or 0) <= to < last for to, _ in rollbacks)
    expected = pytest.raises(UsageError, match="went back") if affected else nullcontext()
    with expected:
        plan_replay(run, first, last, None)


@pytest.mark.parametrize(
    ("changed", "asked", "words"),
    [
        ({"own_program": True}, (14, 14), "program of its own"),
        ({"imported": True, "committed": ()}, (14, 14), "imported weights"),
        ({}, (14, 21), "step 21 is not in metrics.jsonl"),
        ({}, (14, 13), "is before --step"),
        (
            {
                "lines": {11: line(11), 12: line(12), 13: line(13, attempt=2)},
                "configs": {1: CONFIG, 2: CONFIG | {"optimizer": {"lr": 0.2}}},
            },
            (11, 13),
            "changed after step 12 (optimizer.lr 0.1 -> 0.2)",
        ),
    ],
)
def test_what_cannot_be_the_same_is_refused(
    changed: dict[str, Any], asked: tuple[int, int], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan_replay(recorded(**changed), *asked, None)
    assert words in str(refused.value)


def test_what_neither_affects_a_step_nor_its_rate_may_change() -> None:
    lines = {11: line(11), 12: line(12, attempt=2)}
    other = CONFIG | {"eval": {"interval": None}, "hooks": {}, "slurm": {"requeue": False}}
    plan = plan_replay(recorded(lines=lines, configs={1: CONFIG, 2: other}), 11, 12, None)
    assert plan.config == other


def test_values_that_both_have_are_compared() -> None:
    theirs = {3: line(3, grad_norm=1.5), 4: line(4, margin=0.25), 5: line(5)}
    here = {3: line(3, lr=0.1), 4: line(4, margin=0.5, tokens_per_second=9.0)}
    first, second = compare_steps(theirs, here)
    assert (first.step, dict(first.differing)) == (3, {})
    assert dict(second.differing) == {"margin": (0.25, 0.5)}
    assert second.between("in A", "in B") == "step 4 differs: margin 0.25 in A, 0.5 in B"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=12))
def test_of_a_trace_the_last_whole_record_of_each_step_counts(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int, bool]]
) -> None:
    """An interrupted replay has torn records, and steps that it has recorded twice."""
    folder = tmp_path_factory.mktemp("replay")
    expected: dict[int, list[dict[str, object]]] = {}
    with trace_of(folder).open("w") as file:
        for number, (step, more, torn) in enumerate(records):
            head = {"step": step, "kind": "step", "lines": more, "number": number}
            lines = [head, *({"step": step, "kind": "output", "n": n} for n in range(more))]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            file.write(text[: len(text) * 2 // 3] if torn else text)
            if torn:
                file.write("\n")
            else:
                expected[step] = lines
    assert copy_trace(folder, folder / "copy") == sorted(expected)
    found = [json.loads(line) for line in (folder / "copy").read_text().splitlines()]
    assert found == [line for step in sorted(expected) for line in expected[step]]
