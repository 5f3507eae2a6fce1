"""A loss that leaves the rails: nothing bad reaches the weights, and the run finds its way back."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
from harness import Run, drills, manifest, wait_until
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from kempner.checkpoint.format.manifest import encode, read
from kempner.checkpoint.io.verify import verify

pytestmark = pytest.mark.timeout(300)

THREE = "--resilience.rollback_after=3"


def nan_at(*steps: int, rank: int, kind: str = "nan") -> list[str]:
    return [f"{kind} rank {rank} at step {step}" for step in steps]


def complete(run: Run, world: int, *overrides: str, faults: list[str] | None = None) -> str:
    job = run.supervise(world, *overrides, KEMPNER_FAULTS="; ".join(faults or []))
    assert job.wait(150) == 0, job.output()
    return job.output()


def state_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that verifies, by name."""
    checkpoint = run.checkpoints / f"step-{step:08d}"
    assert verify(checkpoint) == []
    whole = run.folder / f"step-{step}.pt"
    dcp_to_torch_save(checkpoint, whole)
    loaded: dict[str, torch.Tensor] = torch.load(whole, weights_only=True)
    return loaded


def assert_same_state(run: Run, reference: Run, step: int) -> None:
    one, other = state_of(run, step), state_of(reference, step)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(bool(tensor.isfinite().all()) for tensor in one.values())


def move_cursor(run: Run, step: int, cursor: int) -> None:
    """Let the run go on from a checkpoint of its own, but with other samples."""
    latest = run.checkpoints / "latest"
    latest.unlink()
    latest.symlink_to(f"step-{step:08d}")
    checkpoint = latest.resolve()
    found = read(checkpoint)
    moved = replace(found, train_state=replace(found.train_state, cursor=cursor))
    (checkpoint / "manifest.json").write_bytes(encode(moved))


def test_a_bad_batch_costs_that_batch_alone(run: Run, reference: Run) -> None:
    """Through a stop and a resume, too: the same run in every bit, with those steps left out."""
    faults = [*nan_at(7, rank=1), *nan_at(33, rank=0, kind="nan_gradients")]
    complete(reference, 2, faults=faults)
    job = run.supervise(2, KEMPNER_FAULTS=faults[0])
    run.reach(13, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert max(run.steps()) < 33
    complete(run, 2, faults=[f"{faults[1]} attempt 2"])
    assert run.steps() == reference.steps()
    (loss, norm, _), (finite, gradient, _) = run.steps()[7], run.steps()[33]
    assert (loss, norm, gradient) == (None, None, None)
    assert finite < run.steps()[1][0]
    assert [s for step in run.samples().values() for s in step] == list(range(8 * 40))
    assert [e["step"] for e in run.events("step_skipped")] == [7, 33]
    assert run.events("rolled_back") == []
    assert_same_state(run, reference, 40)


@pytest.mark.parametrize(
    ("world", "faults", "last_good", "end"),
    [
        (2, [*nan_at(14, 16, rank=1), *nan_at(15, rank=0, kind="nan_gradients")], 10, 16 * 8),
        pytest.param(
            1,
            [f"spike rank 0 by 300 at step {step}" for step in (26, 27, 28)],
            20,
            28 * 8,
            marks=pytest.mark.drill,
        ),
    ],
    ids=["nan", "spikes"],
)
def test_three_in_a_row_are_left_behind(
    run: Run,
    reference: Run,
    undisturbed: Callable[..., Run],
    world: int,
    faults: list[str],
    last_good: int,
    end: int,
) -> None:
    """The run goes back, and is then the run that never saw those batches."""
    everything = "--checkpoint.keep_last=9"
    output = complete(run, world, THREE, everything, faults=faults)
    assert f"back at step {last_good}, without {end - 8 * last_good} samples" in output
    reference.go_on_from(undisturbed(world, everything))
    move_cursor(reference, last_good, end)
    complete(reference, world, everything)
    assert run.steps() == reference.steps()
    assert_same_state(run, reference, 40)
    (told,) = run.events("rolled_back")
    kept = {"at": end // 8, "to": last_good, "start": 8 * last_good, "end": end}
    assert kept.items() <= told.items()
    assert manifest(run.checkpoints / "latest")["rollbacks"] == [kept]
    taken = run.samples()
    assert taken[last_good + 1][0] == end
    assert [s for step in taken.values() for s in step] == [
        *range(8 * last_good),
        *range(end, end + 8 * (40 - last_good)),
    ]


def test_what_was_left_out_stays_out(run: Run, reference: Run) -> None:
    """After a kill before the next commit, and where older checkpoints are all that is left."""
    bad = nan_at(24, 25, 26, rank=0)
    complete(reference, 1, THREE, "--checkpoint.keep_last=9", faults=bad)
    options = (THREE, "--checkpoint.keep_last=9")
    complete(run, 1, *options, faults=[*bad, "kill rank 0 at step 28"])
    assert [e["step"] for e in run.events("resumed")] == [20]
    assert run.steps() == reference.steps()
    assert run.samples() == reference.samples()

    for step in (40, 30, 20):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    complete(run, 1, *options)
    assert run.steps() == reference.steps()
    assert run.samples() == reference.samples()
    assert_same_state(run, reference, 40)


def test_where_it_does_not_help_the_run_ends_with_its_last_good_state(run: Run) -> None:
    options = (THREE, "--resilience.max_rollbacks=2", "--checkpoint.interval=4")
    job = run.supervise(2, *options, KEMPNER_FAULTS="nan rank 1 from step 11")
    assert job.wait(150) == 78, job.output()
    assert "2 rollbacks did not help (resilience.max_rollbacks=2); `latest` is" in job.output()
    assert "Traceback" not in job.output()
    assert [e["to"] for e in run.events("rolled_back")] == [8, 4]
    assert run.latest() == 8  # made again, with other samples, on the way from step 4
    assert (run.checkpoints / "step-00000008.abandoned-a1").is_dir()
    assert len(run.events("diverged")) == 1
    for step in run.committed():
        assert all(bool(tensor.isfinite().all()) for tensor in state_of(run, step).values())
    (verdict,) = run.events("gave_up")
    assert (verdict["code"], verdict["raised"] in job.output()) == (78, True)
    run.record.gave_up.unlink()
    complete(run, 2, *options)
    assert run.latest() == 40


def test_ten_in_a_row_before_any_checkpoint(run: Run) -> None:
    options = ("--resilience.rollback_after=10", "--checkpoint.interval=30")
    job = run.train(*options, KEMPNER_FAULTS="nan rank 0 from step 3")
    assert job.wait() == 78, job.output()
    assert "at step 12, and there is no checkpoint yet to go back to; nothing was saved" in (
        job.output()
    )
    assert len(run.events("step_skipped")) == 10
    assert run.committed() == []


def test_what_is_suspicious_is_not_saved(run: Run) -> None:
    """A save waits for a sound step, a stop leaves the last commit, and the end is a sound one."""
    job = run.train("--train.max_steps=22", KEMPNER_FAULTS="; ".join(nan_at(10, 11, 22, rank=0)))
    assert job.wait() == 0, job.output()
    assert [e["step"] for e in run.events("checkpoint_committed")] == [12, 20, 22]
    (told,) = run.events("rolled_back")
    assert (told["at"], told["to"]) == (22, 20)


def test_a_stop_among_spikes_commits_none_of_it(run: Run) -> None:
    options = ("--resilience.rollback_after=1000", "--train.max_steps=100000")
    job = run.train(*options, KEMPNER_FAULTS="spike rank 0 by 300 from step 25")
    wait_until(lambda: run.events("loss_spike"), "a spike", job=job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.latest() == 20
    lost = run.events("stopped")[0]["lost_steps"]
    assert lost == max(run.steps()) - 20
    assert "because the loss diverged at the end; the next start repeats" in job.output()


@pytest.mark.parametrize(
    ("damaged", "bad", "back"),
    [(20, [24, 25, 26], [10]), *drills((10, [24, 25, 26, 28, 29, 30], [20, 20]))],
    ids=["the newest", "the older one"],
)
def test_a_rollback_to_a_damaged_checkpoint_takes_another(
    run: Run, damaged: int, bad: list[int], back: list[int]
) -> None:
    faults = ["stop rank 0 at step 24", *nan_at(*bad, rank=0)]
    options = (THREE, "--checkpoint.async_save=false", "--checkpoint.keep_last=9")
    job = run.train(*options, KEMPNER_FAULTS="; ".join(faults))
    stopped = psutil.Process(job.process.pid)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the rank to stop", job=job)
    data = next((run.checkpoints / f"step-{damaged:08d}").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    job.signal(signal.SIGCONT)
    assert job.wait() == 0, job.output()
    told = run.events("rolled_back")
    assert [event["to"] for event in told] == back
    assert all(event["start"] == 8 * event["to"] for event in told)
    assert [e["step"] for e in run.events("checkpoint_damaged")] == [damaged]
