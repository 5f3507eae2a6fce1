"""A run goes on from what another program saved, as if it had saved it itself."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import KEMPNER, Run

from kempner.checkpoint.convert.dcp_reader import RestrictedReader

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
    subprocess.run([*KEMPNER, "checkpoint", "import", stock, *into, *position], check=True)
    job = run.train()
    assert job.wait() == 0, job.output()
    assert "the checkpoint was imported: assuming that its data is this run's" in job.output()
    expected = {step: values for step, values in reference.steps().items() if step > 20}
    assert run.steps() == expected
    assert sorted(expected) == list(range(21, 41))
