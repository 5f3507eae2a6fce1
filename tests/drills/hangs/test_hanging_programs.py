"""Sixty programs that hang, or seem to: which are ended, and what is said of them.

The limits of those that hang are short, by configuration. Those that are healthy have the default
limits divided by thirty and more, and seem to hang for longer than these: what is not ended so is
not ended by the defaults, whose every limit is longer, before `hang_timeout_at_work`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm
from drilling import note
from harness import KEMPNER, Job, Run
from patience import slowed

from kempner.run.record.run_dir import RunDirectory

pytestmark = [pytest.mark.timeout(600), pytest.mark.drill]

PROGRAM = Path(__file__).with_name("hanging.py")
SOON, AT_WORK = 12.0, 40.0
"""Seconds for which what hangs may stand still, or be at work."""
LEAST, MOST, WORKS, LATE = 8.0, 40.0, 50.0, 600.0
"""Of what is healthy: the limits at which it would be ended, between two steps and elsewhere, how
long it works, and the limits of phases that a case is not about."""


@dataclass(frozen=True)
class Case:
    """`rank` does what `kind` says in a `phase` of a program of such a `form`, on `world` ranks."""

    kind: str
    phase: str
    form: str
    world: int
    rank: int = 0
    healthy: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.phase}-{self.form}-{self.world}"

    @property
    def stands(self) -> list[tuple[int, str]]:
        """The lines at which ranks stand, each with the collective there; empty for none."""
        lines = enumerate(PROGRAM.read_text().splitlines(), 1)
        marked = ((n, line.rpartition("# stands: ")[2].split(", ")) for n, line in lines)
        return [(n, "".join(words[1:])) for n, words in marked if words[0] == self.kind]

    def named_in(self, told: str) -> bool:
        """Whether a sentence names the rank, its line, and the collectives of all that wait."""
        together = len(self.stands) > 1 or any(what for _, what in self.stands)
        places = all(
            re.search(rf"in {what} .*hanging\.py:{n}\b" if what else rf"hanging\.py:{n}\b", told)
            for n, what in self.stands
        )
        who = re.search(r"\branks? \d", told) if together else f"rank {self.rank}" in told
        return bool(self.stands) and places and bool(who)


TOGETHER = [
    *(
        Case(kind, "between", "survive", 2, rank=1)
        for kind in ("different", "order", "left", "skips", "groups_differ", "both_receive")
    ),
    Case("barrier_and_reduce", "between", "survive", 2, rank=1),
    Case("raises", "between", "survive", 2, rank=1),
    Case("different", "step", "survive", 8),
    Case("left", "between", "survive", 8, rank=5),
    Case("skips", "between", "survive", 8, rank=3),
    Case("groups_differ", "prepare", "survive", 8),
    Case("different", "between", "by_hand", 2),
    Case("order", "between", "by_hand", 2),
    Case("raises", "step", "by_hand", 2, rank=1),
    Case("different", "between", "silent", 2),
    Case("skips", "prepare", "silent", 2, rank=1),
    Case("both_receive", "between", "silent", 2),
    Case("order", "step", "silent", 2),
    Case("barrier_and_reduce", "after", "silent", 8, rank=7),
]
ALONE = [
    Case("lock", "import", "silent", 1),
    Case("lock", "between", "survive", 2, rank=1),
    Case("lock", "prepare", "by_hand", 2),
    Case("lock", "after", "survive", 1),
    Case("lock", "start", "silent", 8, rank=7),
    Case("storage", "import", "silent", 2),
    Case("storage", "prepare", "survive", 2, rank=1),
    Case("storage", "between", "survive", 8, rank=6),
    Case("storage", "step", "by_hand", 1),
    Case("gil", "step", "survive", 2, rank=1),
    Case("gil", "prepare", "silent", 2),
    Case("regex", "between", "survive", 2, rank=1),
    Case("retry", "start", "silent", 1),
    Case("retry", "prepare", "survive", 2),
    Case("retry", "between", "by_hand", 2, rank=1),
    Case("loader", "step", "survive", 2, rank=1),
    Case("loader", "step", "silent", 1),
    Case("download", "start", "silent", 2, rank=1),
    Case("download", "between", "survive", 1),
    Case("stopped", "start", "silent", 2, rank=1),
    Case("stopped", "between", "survive", 2, rank=1),
    Case("stopped", "step", "survive", 8, rank=4),
    Case("python", "between", "survive", 2, rank=1),
    Case("exit_barrier", "exit", "survive", 2, rank=1),
    Case("exit_barrier", "exit", "silent", 2),
    Case("exit_lock", "exit", "survive", 1),
]
HEALTHY = [
    Case("works", "import", "silent", 1),
    Case("works", "prepare", "survive", 2),
    Case("works", "start", "survive", 2, rank=1),
    Case("works", "between", "survive", 2),
    Case("works", "prepare", "silent", 8),
    Case("works", "after", "survive", 2),
    Case("native", "between", "by_hand", 2, rank=1),
    Case("child", "between", "survive", 2),
    Case("pool", "between", "survive", 2),
    Case("slow_storage", "evaluation", "survive", 2),
    Case("slow_download", "between", "survive", 2),
    Case("slow_download", "start", "silent", 2),
    Case("holds_the_gil", "between", "survive", 2, rank=1),
    Case("starved", "between", "survive", 2, rank=1),
]
CASES = [*TOGETHER, *ALONE, *(Case(**{**vars(case), "healthy": True}) for case in HEALTHY)]
AT_DEFAULTS = [
    Case("slow_storage", "evaluation", "survive", 2),
    Case("slow_download", "between", "survive", 2),
    Case("starved", "between", "survive", 2, rank=1),
    Case("pool", "between", "by_hand", 2),
    Case("slow_download", "prepare", "silent", 2),
    Case("child", "between", "silent", 2, rank=1),
]
"""Those that are left alone by the default limits, too, if they go on for `GOES_ON` seconds."""
GOES_ON = float(os.environ.get("KEMPNER_HANGS_SECONDS", "0"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_that_hangs_is_ended_and_named_and_one_at_work_is_left_alone(
    run: Run, case: Case
) -> None:
    assert len(CASES) == 60
    job = start(run, case)
    code = job.wait(300)
    hangs = run.events("hang")
    (ended, *_) = run.events("attempt_ended")
    told = " ".join([*(hang["reason"] for hang in hangs), ended.get("reason") or ""])
    row = {"seconds": round(hangs[0].get("seconds") or 0.0, 1)} if hangs else {}
    named = case.named_in(told)
    note("hangs", **vars(case), ended=bool(hangs) or code != 0, named=named, told=told, **row)
    if case.healthy:
        assert (code, hangs) == (0, []), job.output()
        return
    assert code != 0, job.output()
    assert named, told


@pytest.mark.skipif(not GOES_ON, reason="set KEMPNER_HANGS_SECONDS: 1800 is the default limit")
@pytest.mark.timeout(GOES_ON + 1800)
def test_what_is_healthy_is_left_alone_at_the_defaults(run: Run) -> None:
    jobs = [_run(run, case, [], GOES_ON, case.name) for case in AT_DEFAULTS]
    codes = [job.wait(GOES_ON + 900) for job in jobs]
    for case, code in zip(AT_DEFAULTS, codes, strict=True):
        ledger = RunDirectory(run.folder / "runs" / case.name).ledger
        events = [json.loads(line) for line in ledger.read_text().splitlines()]
        told = [e["reason"] for e in events if e["event"] in ("hang", "attempt_ended")]
        row = {"ended": code != 0, "told": " ".join(told), "seconds": GOES_ON}
        note("hangs_at_defaults", **vars(case) | {"healthy": True}, **row)
    assert codes == [0] * len(jobs), [job.output() for job in jobs]


def start(run: Run, case: Case) -> Job:
    least, most = (LEAST, MOST) if case.healthy else (SOON / 2, SOON)
    limits = {"min": slowed(least), "max": slowed(most), "at_work": AT_WORK}
    if case.healthy:
        limits["at_work"] = slowed(600.0)
    if case.healthy and case.phase in ("between", "evaluation"):  # what comes before is not meant
        others = ("start", "rendezvous", "load", "compile", "save", "exit")
        limits |= {f"max_of.{phase}": LATE for phase in others}
    options = [f"--resilience.hang_timeout_{name}={value}" for name, value in limits.items()]
    if case.phase != "import":
        options.append('--supervise.fork_imports=["torch"]')
    return _run(run, case, options, slowed(WORKS) if case.healthy else 0.0, "run")


def _run(run: Run, case: Case, options: Sequence[str], seconds: float, name: str) -> Job:
    log = run.folder / f"{name}.out"
    command = [
        *(*KEMPNER, "supervise", f"--run.dir={run.folder}/runs", f"--run.name={name}"),
        *(f"--nproc={case.world}", "--supervise.max_restarts_without_progress=0", *options),
        *("--", sys.executable, str(PROGRAM), case.form, case.phase, case.kind),
        *(str(case.rank), str(seconds)),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "FOLDER": f"{run.folder}/runs/{name}"}
    with log.open("wb") as out:
        run.jobs.append(Job(warm.start(command, environ, out, run.folder), log))
    return run.jobs[-1]
