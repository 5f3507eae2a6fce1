"""A run whose ranks are killed again and again: the plan, and what must hold in the end.

Each attempt has one kill: SIGKILL of one rank, at one moment, from outside or by a fault on demand.
The plan goes forward: between two kills beyond the first step there is at least one commit, and no
two kills before it follow each other, so that the run is not given up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, islice
from random import Random

from drilling import SMALLEST_MODEL, note
from harness import Run

from kempner.run.record.ledger import read_lines

EARLY = ("start", "load")
SAVING = ("stage", "write", "commit")
MOMENTS = (*EARLY, "step", *SAVING)


@dataclass(frozen=True)
class Kill:
    """SIGKILL to `rank` at a moment of an attempt; of the step, where there is one.

    `after` is for a test that kills in `start` from outside: seconds since the process is there.
    """

    attempt: int
    rank: int
    moment: str
    step: int | None
    after: float | None

    @property
    def fault(self) -> str:
        """As it is asked for."""
        at = "" if self.step is None else f"at step {self.step} "
        return f"kill rank {self.rank} {at}in {self.moment} attempt {self.attempt}"


def plan_kills(count: int, world: int, interval: int, seed: int) -> list[Kill]:
    """`count` kills, spread evenly over `MOMENTS`, in a run that saves every `interval` steps."""
    random, step = Random(seed), 0
    kills: list[Kill] = []
    for moment in _order(count, random):
        if moment in SAVING:
            step = (step // interval + 2) * interval
        elif moment == "step":
            step += 2 * interval + random.randint(1, interval)
        at = None if moment in EARLY else step
        after = round(random.random(), 2) if moment == "start" else None
        kills.append(Kill(len(kills) + 1, random.randrange(world), moment, at, after))
    return kills


def _order(count: int, random: Random) -> Iterator[str]:
    """Shuffled, with a later moment between any two early ones."""
    moments = list(islice(cycle(MOMENTS), count))
    random.shuffle(moments)
    early = iter([moment for moment in moments if moment in EARLY])
    late = [moment for moment in moments if moment not in EARLY]
    before = set(random.sample(range(len(late)), count - len(late)))
    for place, moment in enumerate(late):
        if place in before:
            yield next(early)
        yield moment


def overrides(kills: Sequence[Kill], world: int, interval: int) -> list[str]:
    """For a run in which all of them happen, with a commit after the last."""
    steps = max(kill.step or 0 for kill in kills) + 2 * interval
    return [
        *SMALLEST_MODEL,
        f"--train.max_steps={steps}",
        f"--train.global_batch_size={world}",
        "--train.micro_batch_size=1",
        f"--checkpoint.interval={interval}",
        f"--supervise.keep_attempts={len(kills) + 1}",  # each is looked at in the end
    ]


def assert_on_demand(run: Run, kills: Iterable[Kill], output: str) -> None:
    """Each of these was a fault on demand, and happened."""
    said = output + "".join(path.read_text() for path in run.record.attempts.glob("*/rank-*.out"))
    for kill in kills:
        assert f"injecting fault (fault {kill.fault}" in said


def assert_healed(run: Run, reference: Run, kills: Sequence[Kill]) -> None:
    """Every kill was laid to the rank that it hit, and cost what came after the last commit at
    most; weights, losses and samples are those of the undisturbed run.
    """
    ended = run.events("attempt_ended")
    assert [event["culprit"] for event in ended] == [*(kill.rank for kill in kills), None]
    for attempt in range(2, len(kills) + 2):
        assert _first_step(run, attempt) in (None, _resumed(run, attempt) + 1)
        assert _resumed(run, attempt) >= _committed(run, before=attempt)
    assert run.steps() == reference.steps()
    assert run.samples() == reference.samples()
    taken = run.taken()
    assert sorted(taken) == list(range(len(taken)))
    assert run.weights() == reference.weights() != {}


def note_healing(drill: str, run: Run, kills: Sequence[Kill], plain: Sequence[float]) -> None:
    """Record each kill with the seconds from the first sign of it to the next start of the ranks
    and to the next new step, None where the next kill came before; and what plain starts took.
    """
    started = {event["attempt"]: event["time"] for event in run.events("attempt_started")}
    known: list[float] = []
    restarts: list[float] = []
    for kill, again in zip(kills, steps_made_again(run, kills), strict=True):
        restarts.append(round(started[kill.attempt + 1] - _noticed_at(run, kill), 2))
        seconds = _seconds_to_new_step(run, kill)
        known += [seconds] if seconds is not None else []
        note(
            drill,
            **vars(kill),
            steps_made_again=again,
            seconds_to_restart=restarts[-1],
            seconds_to_new_step=seconds,
        )
    note(
        f"{drill}, all",
        kills={moment: sum(k.moment == moment for k in kills) for moment in MOMENTS},
        steps_alike=len(run.steps()),
        seconds_to_restart=_middle_and_longest(restarts),
        seconds_to_new_step=_middle_and_longest(known),
        plain_starts=plain,
    )


def steps_made_again(run: Run, kills: Iterable[Kill]) -> list[int]:
    """What each kill has cost."""
    return [_furthest(run, k.attempt) - _resumed(run, k.attempt + 1) for k in kills]


def plain_start(run: Run) -> float:
    """Seconds from the start of the ranks, in the first attempt, to the first step."""
    started = run.events("attempt_started")[0]["time"]
    return round(next(run.metrics())["time"] - started, 2)


def _middle_and_longest(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "longest": max(seconds)}


def _seconds_to_new_step(run: Run, kill: Kill) -> float | None:
    before = _furthest(run, kill.attempt)
    first = next(line for line in run.metrics() if line["step"] > before)
    if first["attempt"] > kill.attempt + 1:
        return None
    return round(first["time"] - _noticed_at(run, kill), 2)


def _noticed_at(run: Run, kill: Kill) -> float:
    """When the supervisor saw the first sign of a kill, in seconds since the epoch."""
    log = read_lines(run.record.supervisor_log(kill.attempt))
    signs = (
        e
        for e in log
        if e["event"] in ("rank disconnected", "rank ended") and e["rank"] == kill.rank
    )
    return datetime.fromisoformat(next(signs)["timestamp"]).timestamp()


def _furthest(run: Run, attempt: int) -> int:
    """The last step that any attempt up to this one made."""
    return max((m["step"] for m in run.metrics() if m["attempt"] <= attempt), default=0)


def _first_step(run: Run, attempt: int) -> int | None:
    return next((line["step"] for line in run.metrics() if line["attempt"] == attempt), None)


def _resumed(run: Run, attempt: int) -> int:
    """The step from which an attempt went on; of one killed before it loaded, the next that did."""
    begun = {event["attempt"]: 0 for event in run.events("started")}
    begun |= {event["attempt"]: event["step"] for event in run.events("resumed")}
    return begun[min(number for number in begun if number >= attempt)]


def _committed(run: Run, before: int) -> int:
    """The last step that was committed before an attempt, as far as rank 0 could tell of it."""
    events = run.events("checkpoint_committed")
    return max((e["step"] for e in events if e["attempt"] < before), default=0)
