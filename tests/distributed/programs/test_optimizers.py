"""Every optimizer over ranks, and through a stop and a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Run, drills, launch

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(("world", "replicas"), [(4, 2), *drills((3, 1), (2, 1), (2, 2))])
def test_muon_over_shards_is_muon(world: int, replicas: int) -> None:
    launch(Path(__file__).with_name("muon_over_ranks.py"), world, replicas)


MUON = ['--optimizer.name="muon"']
SGD = ['--optimizer.name="sgd"', "--optimizer.nesterov=true", "--optimizer.lr=0.1"]


@pytest.mark.parametrize(("world", "options"), [(2, MUON), *drills((1, SGD), (1, MUON), (2, SGD))])
def test_a_stop_changes_nothing(run: Run, reference: Run, world: int, options: list[str]) -> None:
    reference.complete(world, *options)
    job = run.supervise(world, *options)
    run.reach(13, job)
    job.signal()
    assert job.wait() == 75, job.output()
    run.complete(world, *options)
    assert run.steps() == reference.steps()
    assert len(run.steps()) == 40
    losses = [loss for loss, *_ in run.steps().values()]
    assert losses[-1] < losses[0] - 0.3  # it learns, too


def test_another_optimizer_is_refused_at_a_resume(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    run.go_on_from(undisturbed(1, "--train.max_steps=6"))
    job = run.train("--train.max_steps=8", '--optimizer.name="muon"')
    assert job.wait() == 65
    assert "optimizer.name is 'muon' but the checkpoint was made with 'adamw'" in job.output()
    assert "Traceback" not in job.output()
