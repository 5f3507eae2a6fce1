"""A compiled run, stopped and killed, is the run that was never disturbed, and compiles once.

`make check` has the graph without its kernels: tests/unit/model/test_compilation.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest
from harness import Run, wait_until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

STEPS = 40
OPTIONS = (
    f"--train.max_steps={STEPS}",
    "--train.compile=true",
    '--train.activation_checkpointing="full"',
    "--train.loss_chunk=24",
    "--checkpoint.interval=5",
)


def kernels(run: Run) -> dict[str, float]:
    """What was compiled, and when."""
    files = run.record.compiled.rglob("*.so")
    return {file.name: file.stat().st_mtime for file in files}


def test_a_compiled_run_resumes_to_the_bit_and_compiles_nothing_again(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    reference = undisturbed(2, *OPTIONS)
    job = run.supervise(2, *OPTIONS)
    run.reach(8, job)
    made = kernels(run)
    assert made
    os.kill(run.ready_pid(1, 1, job), signal.SIGKILL)
    run.reach(20, job)
    job.signal()
    assert job.wait(300) == 75, job.output()
    run.complete(2, *OPTIONS)
    assert kernels(run) == made
    assert run.steps() == reference.steps()
    assert [s for step in run.samples().values() for s in step] == list(range(8 * STEPS))


def test_ranks_that_compile_leave_with_their_supervisor(run: Run) -> None:
    """The first step is made by none of them: each would compile for minutes before."""
    job = run.supervise(2, *OPTIONS, KEMPNER_FAULTS="strand rank 1 at step 1")
    pids = [run.ready_pid(1, rank, job) for rank in range(2)]
    job.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks' end", deadline=60)
    assert run.steps() == {}
    assert "the supervisor has ended before the first step" in run.record.log(1, 0).read_text()
    run.complete(2, "--train.max_steps=2", *OPTIONS[1:])


def test_kernels_compute_what_they_were_compiled_from(undisturbed: Callable[..., Run]) -> None:
    options = ("--train.max_steps=3", "--model.dropout=0", "--optimizer.lr=1e-5")
    compiled = undisturbed(2, *options, "--train.compile=true")
    assert kernels(compiled)
    steps = compiled.steps()
    for step, (*numbers, _) in undisturbed(2, *options).steps().items():
        assert [*steps[step][:2]] == pytest.approx(numbers, rel=3e-6)
