"""A run goes on from what another program saved, as if it had saved it itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from harness import KEMPNER, Run

from kempner.checkpoint.convert.import_dcp import RestrictedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_run_goes_on_from_an_imported_checkpoint_bit_for_bit(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    reference = undisturbed(1, "--checkpoint.keep_last=9")
    source, stock = reference.checkpoints / "step-00000020", run.folder / "stock"
    saved = RestrictedReader(source).read_metadata().state_dict_metadata
    state = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in saved.items()
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    dcp.save(state, checkpoint_id=stock, no_dist=True)
    position = ["--step", "20", "--cursor", "160"]
    into = ["--into", str(run.record.path)]
    assert warm.complete(*KEMPNER, "checkpoint", "import", stock, *into, *position)[0] == 0
    job = run.train()
    assert job.wait() == 0, job.output()
    assert "the checkpoint was imported: assuming that its data is this run's" in job.output()
    expected = {step: values for step, values in reference.steps().items() if step > 20}
    assert run.steps() == expected
    assert sorted(expected) == list(range(21, 41))


def test_training_goes_on_from_a_model_of_hugging_face_at_its_loss(
    run: Run, reference: Run, undisturbed: Callable[..., Run]
) -> None:
    """The weights alone, which came from a run, give the loss that its own checkpoint gives."""
    trained = undisturbed(1, "--checkpoint.keep_last=9")
    model = run.folder / "model"
    checkpoint = [*KEMPNER, "checkpoint"]
    assert warm.complete(*checkpoint, "export", trained.record.path, "--to-hf", model)[0] == 0
    own = [trained.record.path, "--step", "0", "--cursor", "0"]
    sources = [(run, ["--from-hf", model]), (reference, own)]
    for one, source in sources:
        assert warm.complete(*checkpoint, "import", *source, "--into", one.record.path)[0] == 0
        job = one.train("--train.max_steps=3")
        assert job.wait() == 0, job.output()
    losses = [[loss for loss, *_ in one.steps().values()] for one, _ in sources]
    assert losses[0][0] == losses[1][0]
    beginning, *_ = [loss for loss, *_ in trained.steps().values()]
    assert losses[0][0] < beginning - 0.5
    assert max(losses[0]) < beginning - 0.5
