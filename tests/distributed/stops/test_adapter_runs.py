"""A run that trains an adapter: stopped, killed, moved to another world, its weights gone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from harness import KEMPNER, Run
from test_stop_and_resume import LONG, STEPS, assert_same, stop_and_kill

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.tensors.load import open_contents

pytestmark = pytest.mark.timeout(300)

ADAPTER = ("--adapter.rank=2", "--adapter.dropout=0.1", "--checkpoint.in_memory=true")


def begin(run: Run, trained: Run, cursor: int = 0) -> None:
    """Import what another run has trained, beside which this one trains an adapter."""
    again = ("--step", "0", "--cursor", str(cursor))
    source = (trained.record.path, "--into", run.record.path)
    assert warm.complete(*KEMPNER, "checkpoint", "import", *source, *again)[0] == 0
    run.overrides += ADAPTER


def files(checkpoint: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in checkpoint.iterdir()}


def test_an_adapter_goes_on_bit_for_bit_and_in_another_world(
    run: Run, reference: Run, undisturbed: Callable[..., Run]
) -> None:
    """Stopped by a signal, then killed, with steps in memory; the weights are never written."""
    first, second = sorted(random.Random(7).sample(range(2, 50), 2))
    trained, base = undisturbed(1), run.checkpoints / "step-00000000"
    for one in (run, reference):
        begin(one, trained)
    imported = files(base)
    reference.complete(2, LONG)
    stop_and_kill(run, first, second, LONG)
    assert run.events("step_salvaged")
    assert_same(run, reference)
    assert run.weights() == reference.weights()
    assert min(loss for loss, *_ in run.steps().values()) < run.steps()[1][0]

    run.complete(3, f"--train.max_steps={STEPS + 6}")
    assert list(run.steps()) == list(range(1, STEPS + 7))
    assert files(base) == imported
    assert len(run.committed()) == 4, "the last three, and the weights"
    for step in run.committed()[1:]:
        checkpoint = run.checkpoints / f"step-{step:08}"
        contents = open_contents(checkpoint, read(checkpoint))
        assert all(".lora_" in key for key in contents.tensors)


def test_a_rollback_to_the_imported_weights_begins_anew(
    run: Run, reference: Run, undisturbed: Callable[..., Run]
) -> None:
    """As a run that never saw the samples that the rollback has left out."""
    few = ("--train.max_steps=8", "--resilience.rollback_after=2")
    begin(run, undisturbed(1))
    begin(reference, undisturbed(1), cursor=32)
    faults = "; ".join(f"nan rank 0 at step {step}" for step in (3, 4))
    job = run.supervise(2, *few, KEMPNER_FAULTS=faults)
    assert job.wait() == 0, job.output()
    assert [event["to"] for event in run.events("rolled_back")] == [0]
    reference.complete(2, *few)
    assert run.steps() == reference.steps()
    assert run.weights() == reference.weights()


def test_what_an_adapter_needs_and_has_not_is_said_in_a_sentence(
    run: Run, reference: Run, undisturbed: Callable[..., Run]
) -> None:
    base = run.checkpoints / "step-00000000"

    def refused(code: int, *overrides: str, one: Run = run) -> str:
        job = one.train("--train.max_steps=13", *overrides)
        assert job.wait() == code, job.output()
        return job.output()

    assert "[adapter] trains beside the weights of a model" in refused(2, *ADAPTER)
    begin(run, undisturbed(1))
    run.complete(1, "--train.max_steps=12")
    assert "adapter.alpha is 3.0 but the checkpoint was" in refused(65, "--adapter.alpha=3.0")
    plain = Run(reference.folder, run.data)
    plain.complete(1, "--train.max_steps=12")
    assert "a model that was trained whole" in refused(2, *ADAPTER, one=plain)
    run.overrides.clear()
    assert "the checkpoint holds nothing but an adapter" in refused(65)
    run.overrides += ADAPTER

    weights = base / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    said = refused(65)
    assert "beside which the adapter is trained are damaged (step-00000000" in said
    base.rename(run.folder / "elsewhere")
    assert "beside which the adapter was trained are gone" in refused(65)
    assert run.committed() == [10, 12], "nothing else is set aside"
