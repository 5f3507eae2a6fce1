"""A hundred steps of runs that had five faults each are computed again, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import groupby

import pytest
from drilling import ALL, SEED, note
from harness import Run, drills

from kempner.insight.replay import start_of
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(1800)

PARTS, CHOSEN = 4, 25 if ALL else 2
STEPS, INTERVAL = 160, 20
OPTIONS = (
    f"--train.max_steps={STEPS}",
    "--train.same_on_any_world=true",
    f"--checkpoint.interval={INTERVAL}",
    f"--checkpoint.keep_every={INTERVAL}",
    "--resilience.rollback_after=2",
)


def disturb(run: Run, draw: random.Random) -> None:
    """A kill, a rollback and a stop on two ranks, a kill and a stop on three; then one is left."""
    trouble = draw.randrange(41, 50)
    first = (
        f"kill rank {draw.randrange(2)} at step {draw.randrange(21, 36)}",
        *(f"nan rank 0 at step {step} attempt 2" for step in (trouble, trouble + 1)),
    )
    job = run.supervise(2, *OPTIONS, KEMPNER_FAULTS="; ".join(first))
    run.reach(draw.randrange(52, 60), job)
    job.signal()
    assert job.wait(200) == 75, job.output()
    stopped = run.latest()
    kill = f"kill rank {draw.randrange(3)} at step {stopped + draw.randrange(5, 12)} attempt 3"
    job = run.supervise(3, *OPTIONS, KEMPNER_FAULTS=kill)
    run.reach(stopped + draw.randrange(15, 25), job)
    job.signal()
    assert job.wait(200) == 75, job.output()
    run.complete(1, *OPTIONS)
    assert len(run.events("restarting")) == 2, "two kills"
    assert [e["ranks"] for e in run.events("attempt_started")] == [2, 2, 3, 3, 1]


def replay(run: Run, steps: list[int], ranks: int) -> RunDirectory:
    """Compute the first to the last of some steps again; the folder of that."""
    span = ["--step", str(steps[0]), "--to", str(steps[-1])]
    command = [sys.executable, "-m", "kempner", "replay", str(run.record.path), *span]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--keep"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    made = steps[-1] - steps[0] + 1
    assert f"{made} step{'s' * (made > 1)}: equal to the bit" in done.stdout
    return RunDirectory(run.record.replays / f"{steps[0]}-{steps[-1]}-on-{ranks}")


@pytest.mark.parametrize("part", [0, *drills(*range(1, PARTS))])
def test_any_step_is_computed_again_in_one_start_from_the_checkpoint_before(
    run: Run, part: int
) -> None:
    """Several of a checkpoint's steps at once, on as many ranks as the run had or others."""
    draw = random.Random(f"{SEED} {part}")
    disturb(run, draw)
    (back,) = run.events("rolled_back")
    committed = run.committed()
    starts = {step: start_of(committed, step) or 0 for step in range(1, STEPS + 1)}
    possible = [step for step, start in starts.items() if not start <= back["to"] < step]
    chosen = sorted(draw.sample(possible, CHOSEN))
    made, computed = 0, []
    for start, group in groupby(chosen, key=lambda step: starts[step]):
        steps = list(group)
        place = replay(run, steps, ranks=draw.choice((1, 1, 2, 3)))
        events = [line["event"] for line in read_lines(place.ledger)]
        assert events.count("attempt_started") == 1
        again = [line["step"] for line in read_lines(place.metrics) if "loss" in line]
        assert again == list(range(start + 1, steps[-1] + 1)), "no step more than it takes"
        made, computed = made + 1, computed + again
    facts = {"part": part, "steps": len(chosen), "equal": len(chosen), "starts": made}
    longest = max(step - starts[step] for step in chosen)
    note("replay", **facts, computed=len(computed), most_steps_for_one=longest, faults=5)
