"""What ranks and optimizers are compared by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kempner.run.process.exit_codes import DataError
from kempner.run.record.identity import RunIdentity, compare
from kempner.run.record.run_dir import RunDirectory
from kempner.training.groups.process_groups import describe_disagreement
from kempner.training.session import RunComparison, describe_optimizer

FACTS = st.fixed_dictionaries({"seed": st.integers(0, 1), "data": st.sampled_from(["a", "b"])})


@given(st.lists(FACTS, min_size=1, max_size=6))
def test_each_fact_that_differs_is_named_with_every_rank(told: list[Mapping[str, object]]) -> None:
    said = describe_disagreement([{**facts, "host": f"n{r}"} for r, facts in enumerate(told)])
    sentences = dict(s.split(" is not the same on all ranks: ") for s in said.split("; ") if said)
    assert set(sentences) == {n for n in ("seed", "data") if len({f[n] for f in told}) > 1}
    for name, sentence in sentences.items():
        ranks = re.sub(r" on n\d+| (?:has|have) \w", "", sentence)
        assert sorted(map(int, re.findall(r"\d+", ranks))) == list(range(len(told)))
        for value in {facts[name] for facts in told}:
            assert re.search(rf"(?:has|have) {value}\b", sentence)


def optimizer_of(*settings: tuple[int, float]) -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.zeros(size, requires_grad=True)], "lr": lr} for size, lr in settings
    ]
    return torch.optim.AdamW(groups)


def test_an_optimizer_is_the_same_with_its_groups_in_another_order() -> None:
    one, other = (
        describe_optimizer(optimizer_of((2, 0.1), (3, 0.2))),
        describe_optimizer(optimizer_of((3, 0.2), (2, 0.1))),
    )
    assert one == other
    changed = describe_optimizer(optimizer_of((3, 0.2), (2, 0.3)))
    before, now = RunIdentity(facts={"optimizer": one}), RunIdentity(facts={"optimizer": changed})
    (difference,) = compare(before, now)
    assert difference.sentence.startswith("optimizer.groups[")
    assert ".lr was 0.1, now it is 0." in difference.sentence


@pytest.mark.parametrize(("step", "steps", "refused"), [(20, 20, True), (20, 40, False)])
def test_a_complete_run_is_nobody_elses_result(
    tmp_path: Path, step: int, steps: int, refused: bool
) -> None:
    before = RunIdentity(("t.py", "1"), facts={"steps": 20})
    now = replace(before, command=("t.py", "2"), facts={"steps": steps})
    found = tuple(compare(before, now, ["command"]))
    standing = RunComparison(RunDirectory(tmp_path), before, now, found)
    if refused:
        with pytest.raises(DataError, match=r"is complete at step 20, and is not this program's"):
            standing.refuse_if_complete(step)
    else:
        standing.refuse_if_complete(step)
    replace(standing, differences=()).refuse_if_complete(step)
