"""Work of a program of one's own between two steps and after the last one: no hang, no restart."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time

import pytest
import warm
from harness import KEMPNER, Job, Run, wait_until
from patience import slowed

from kempner.insight.run_reader import LiveState, RunFacts
from kempner.insight.status.summary import summarise
from kempner.run.record.history import RunHistory

pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import os, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from kempner import survive

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def work():
    open(f"at-work-{os.environ['KEMPNER_ATTEMPT']}", "w").close()
    if sys.argv[1] in ("sleeps", "evaluates"):
        open("go-on").close()
    while not os.path.exists("go-on"):
        fibonacci(20)

def export():
    raise RuntimeError("no room for the model")

steps = survive(model, optimizer, steps=12, save_every=5, seed=2)
for step in steps:
    optimizer.zero_grad()
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    if step == 8 and sys.argv[1] == "leaves":
        break
    if step == 8 and sys.argv[1] in ("sleeps", "computes", "evaluates"):
        if rank == 0:
            with steps.evaluation() if sys.argv[1] == "evaluates" else nullcontext():
                work()
        dist.barrier()
    if step == 8 and sys.argv[1] == "crosses":
        if rank == 0:
            dist.broadcast(torch.ones(1), 0)
        else:
            dist.all_reduce(torch.ones(1))
if sys.argv[1] == "waits" and rank == 0:
    dist.barrier(async_op=False)
if sys.argv[1] == "fails" and rank == 1:
    export()
if sys.argv[1] == "fails":
    open("exported", "w").close()
print("the end", flush=True)
"""

SOON, LATE = slowed(6.0), slowed(600.0)


def start(run: Run, how: str, *limits: str) -> Job:
    (run.folder / "program.py").write_text(PROGRAM)
    log = run.folder / "job.out"
    where = (f"--run.dir={run.folder}/runs", "--run.name=run", "--nproc=2", *limits)
    command = [*KEMPNER, "supervise", *where, "--", sys.executable, "program.py", how]
    with log.open("wb") as out:
        run.jobs.append(Job(warm.start(command, os.environ, out, run.folder), log))
    return run.jobs[-1]


def at_work(run: Run, attempt: int, job: Job) -> None:
    wait_until(lambda: (run.folder / f"at-work-{attempt}").exists(), "it to be at work", job=job)


def line_of(words: str) -> str:
    """Where the program says this for the first time."""
    found = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if words in line)
    return f"program.py:{found}"


def test_a_rank_that_stands_between_two_steps_is_ended_and_named_once_and_then_left_alone(
    run: Run,
) -> None:
    os.mkfifo(run.folder / "go-on")
    limits = (f"--resilience.hang_timeout_min={SOON}", f"--resilience.hang_timeout_max={SOON}")
    job = start(run, "sleeps", *limits)
    at_work(run, 2, job)
    since = time.monotonic()
    (hang,) = run.events("hang")
    stands = hang["own_program"]
    assert (stands["step"], stands["busy"], hang["laggard"]) == (7, 0, 0)
    assert stands["places"]["0"] == f"at {line_of('go-on')}"
    assert stands["places"]["1"] == f"in barrier at {line_of('dist.barrier')}"
    assert "put that into `with steps.evaluation():`" in hang["reason"]
    wait_until(lambda: time.monotonic() - since > 1.5 * SOON, "longer than before", job=job)
    (run.folder / "go-on").write_text("")
    assert job.wait() == 0, job.output()
    assert len(run.events("hang")) == 1


@pytest.mark.parametrize(("how", "most"), [("computes", 300.0), ("evaluates", 1.0)])
def test_a_rank_that_computes_or_evaluates_between_two_steps_is_left_alone(
    run: Run, how: str, most: float
) -> None:
    """Unmarked it has to move, and has its limit; an evaluation may stand still for ever."""
    soon = slowed(2.0)
    if how == "evaluates":
        os.mkfifo(run.folder / "go-on")
    largest = f"--resilience.hang_timeout_max={slowed(most) + soon}"
    others = ("start", "rendezvous", "load", "compile", "save", "exit")
    limits = [f"--resilience.hang_timeout_max_of.{phase}={LATE}" for phase in others]
    job = start(run, how, f"--resilience.hang_timeout_min={soon}", largest, *limits)
    at_work(run, 1, job)
    since, ranks = time.monotonic(), run.record.ranks(1)
    waiting = lambda: [rank["waiting"] for rank in json.loads(ranks.read_text())]  # noqa: E731
    wait_until(lambda: waiting() == ["", "barrier"], "rank 1 to wait in its barrier", job=job)
    wait_until(lambda: time.monotonic() - since > 3 * soon, "longer than a hang", job=job)
    (run.folder / "go-on").write_text("")
    assert job.wait() == 0, job.output()
    assert run.events("hang") == []


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_what_fails_after_the_last_step_is_told_as_that_and_not_started_again(
    run: Run, how: str
) -> None:
    job = start(run, how)
    assert job.wait() == 79, job.output()
    (ended,) = run.events("attempt_ended")
    assert ended["code"] == 79
    said = {
        "waits": ("rank 0", f"in barrier at {line_of('async_op')}", "(rank 1 had left with 0"),
        "fails": ("rank 1", f"at {line_of('raise')}: RuntimeError: no room", "(rank 0 had left"),
    }
    assert ended["reason"].startswith("training is complete")
    assert all(words in ended["reason"] for words in said[how])
    assert (run.folder / "exported").exists() == (how == "fails")
    assert not run.record.gave_up.exists()
    facts = RunFacts(0.0, RunHistory.read(run.record.ledger), LiveState(alive=False))
    assert summarise(facts).state == f"completed ({ended['reason']})"


def test_a_loop_that_is_left_early_is_not_called_complete(run: Run) -> None:
    job = start(run, "leaves")
    assert job.wait() == 0, job.output()
    (ended,) = run.events("attempt_ended")
    assert (ended["code"], ended["left_at"]) == (0, 8)
    facts = RunFacts(0.0, RunHistory.read(run.record.ledger), LiveState(alive=False))
    assert summarise(facts).state == f"stopped ({ended['reason']})"
    assert "not complete" in ended["reason"]
    assert "not complete" in job.output()


def test_ranks_in_different_collectives_are_named_at_once_and_the_second_time_it_is_final(
    run: Run,
) -> None:
    job = start(run, "crosses")
    assert job.wait() == 77, job.output()
    first, second = run.events("hang")
    places = f"broadcast at {line_of('broadcast')}", f"all_reduce at {line_of('all_reduce')}"
    said = f"deadlock: rank 0 waits in {places[0]}, rank 1 waits in {places[1]}"
    assert first["reason"] == second["reason"] == said
    (gave_up,) = run.events("gave_up")
    assert said in gave_up["reason"]
    assert "every time: a restart would not help" in gave_up["reason"]
    assert gave_up["advice"].startswith("have all ranks of a process group call the same")
    recorded = pickle.loads(run.record.flight(1, 0).read_bytes())["entries"]
    assert "gloo:broadcast" in {e["profiling_name"] for e in recorded if not e["retired"]}
