"""Computes steps of a run again, from the checkpoint before them, and compares the results.

A step is a function of the checkpoint before it, the configuration, the data and the world. So the
replay is a run of its own, in a folder of the run that it repeats: it begins at that checkpoint,
with the configuration of the attempt that made the step, and ends after the last step asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from kempner.config.model import ParallelismSection
from kempner.model.spec.mesh import resolve_degrees
from kempner.run.output.units import count
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events import AttemptStarted, Resumed, RolledBack
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import parse_lines
from kempner.run.record.recorded_config import differences, recorded_config
from kempner.run.record.run_dir import RunDirectory

COMPARED = ("loss", "margin", "accuracy", "grad_norm", "lr", "fingerprint")
"""The values of a line of metrics.jsonl that belong to the step; the second and third are of
preferences only, the last one is of weights and optimizer after it."""

_OF_THE_RUN = ("run", "checkpoint", "supervise", "slurm", "hooks", "metrics", "profiling", "eval",
               "distributed", "program", "resilience", "integrity")  # fmt: skip
"""Sections that do not affect what a step computes."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """What a run has left: its logged steps in (start, last], its events, the `committed` steps,
    and the configuration of each attempt that made one of the steps; for those that are `unkept` it
    is the run's first."""

    lines: Mapping[int, Line]
    committed: Sequence[int]
    rollbacks: Sequence[RolledBack] = ()
    ranks: Mapping[int, int] = field(default_factory=dict)
    own_program: bool = False
    imported: bool = False
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    unkept: Sequence[int] = ()


@dataclass(frozen=True)
class ReplayPlan:
    """Which steps to compute on how many ranks: from the checkpoint of step `start` (None: from the
    initial weights) to `last`; `first` is the first to compare. `seconds` is how long the run took
    for them, None if unknown. `remark` says why the last bits may differ, or is empty. `traced` is
    whether what the steps compute is recorded."""

    start: int | None
    first: int
    last: int
    ranks: int
    config: Mapping[str, Any]
    seconds: float | None = None
    remark: str = ""
    traced: bool = False

    @property
    def steps(self) -> int:
        return self.last - (self.start or 0)

    @property
    def name(self) -> str:
        return f"{self.first}-{self.last}-on-{self.ranks}{'-traced' if self.traced else ''}"

    @property
    def sentence(self) -> str:
        from_ = "the initial weights" if self.start is None else f"step {self.start}"
        took = "" if self.seconds is None else f", for which the run took {self.seconds:.0f} s"
        return (
            f"computes {count(self.steps, 'step')} from {from_} on {count(self.ranks, 'rank')}"
            f"{took}{self.remark}"
        )


def start_of(committed: Sequence[int], step: int) -> int | None:
    """The newest checkpoint before `step`."""
    return max((known for known in committed if known < step), default=None)


def read_recorded(
    run: RunDirectory, committed: Sequence[int], first: int, last: int
) -> RecordedRun:
    """What there is to replay steps `first` to `last`. Raises `OSError`."""
    history = RunHistory.read(run.ledger)
    lines = logged_steps(run.metrics, start_of(committed, first) or 0, last)
    started = history.entries(AttemptStarted)
    attempts = {line["attempt"] for line in lines.values()}
    return RecordedRun(
        lines,
        committed,
        history.events(RolledBack),
        {entry.attempt: entry.event.ranks for entry in started},
        any(entry.event.own_program for entry in started),
        any(event.step == 0 for event in history.events(Resumed)),
        {number: recorded_config(run, number) for number in sorted(attempts)},
        [number for number in sorted(attempts) if not run.attempt(number).is_dir()],
    )


def logged_steps(metrics: Path, after: int, last: int) -> dict[int, Line]:
    """The lines of steps in (`after`, `last`], by step; of a repeated step the last one counts.
    Raises `OSError`."""
    found = {}
    with metrics.open("rb") as file:
        for line in chain.from_iterable(map(parse_lines, file)):
            step = line.get("step")
            if type(step) is int and after < step <= last and "loss" in line:
                found[step] = line
    return dict(sorted(found.items()))


def plan_replay(run: RecordedRun, first: int, last: int, ranks: int | None) -> ReplayPlan:
    """Decide how to compute steps `first` to `last` again. Raises `UsageError` if it is impossible,
    or could not give the same."""
    if last < first:
        raise UsageError(f"--to {last} is before --step {first}")
    start = start_of(run.committed, first)
    _refuse_what_cannot_be_the_same(run, start, first, last)
    made_by = {step: line["attempt"] for step, line in run.lines.items()}
    config = run.configs[made_by[last]]
    worlds = {run.ranks[attempt] for attempt in made_by.values() if attempt in run.ranks}
    chosen = ranks or run.ranks.get(made_by[last], 1)
    others = worlds - {chosen}
    same = bool(config.get("train", {}).get("same_on_any_world"))
    if ranks is not None:
        config = {**config, "parallelism": _mesh_of(config, ranks, same)}
    remark = ""
    if others and not same:
        had = " and on ".join(map(str, sorted(worlds)))
        remark = f"; the run made them on {had}, so that the last bits may differ"
    if run.unkept:
        remark += (
            f"; the files of attempt {run.unkept[0]} were deleted (supervise.keep_attempts), so "
            "that its configuration is taken to be the run's first"
        )
    return ReplayPlan(start, first, last, chosen, config, _duration(run.lines, config), remark)


def _mesh_of(config: Mapping[str, Any], ranks: int, same: bool) -> dict[str, Any]:
    """`parallelism` for this number of ranks: as the run has it; or all shards, if they cannot make
    that mesh, and any other gives the `same`. Raises `UsageError`."""
    section = dict(config.get("parallelism", {}))
    try:
        resolve_degrees(ParallelismSection.model_validate(section), ranks)
    except UsageError:
        if not same:
            raise
        section |= {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1}
    return section


def _refuse_what_cannot_be_the_same(
    run: RecordedRun, start: int | None, first: int, last: int
) -> None:
    if run.own_program:
        raise UsageError(
            "replay computes steps of kempner's own trainer; this run is of a program of its own: "
            "`kempner rehearse` shows whether that resumes exactly"
        )
    missing = [step for step in (first, last) if step not in run.lines]
    if missing:
        raise UsageError(
            f"step {missing[0]} is not in metrics.jsonl: the run has not made it, or logs only "
            "every metrics.log_interval steps"
        )
    if start is None and run.imported:
        raise UsageError(
            f"no checkpoint before step {first} is left, and the run began with imported weights; "
            "name a step after its oldest checkpoint, or set checkpoint.keep_every"
        )
    for back in run.rollbacks:
        if (start or 0) <= back.to < last:
            raise UsageError(
                f"the run went back from step {back.at} to step {back.to}, and no checkpoint after "
                f"that and before step {first} is left: name a step after the next checkpoint"
            )
    attempts = list(dict.fromkeys(line["attempt"] for line in run.lines.values()))
    for number in attempts[:-1]:
        changed = differences(computing(run.configs[number]), computing(run.configs[attempts[-1]]))
        if changed:
            until = max(step for step, line in run.lines.items() if line["attempt"] == number)
            raise UsageError(
                f"the configuration has changed after step {until} ({', '.join(changed)}): let "
                f"--to be at most {until}, or --step be after the next checkpoint"
            )


def computing(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration that affect what a step computes."""
    return {name: table for name, table in config.items() if name not in _OF_THE_RUN}


def _duration(lines: Mapping[int, Line], config: Mapping[str, Any]) -> float | None:
    """Seconds of these steps, by the tokens per second at each logged one."""
    train = config.get("train", {})
    rates = [line.get("tokens_per_second") or 0.0 for line in lines.values()]
    if not rates or min(rates) <= 0 or "global_batch_size" not in train:
        return None
    tokens = train["global_batch_size"] * train["seq_len"]
    every = (max(lines) - min(lines) + 1) / len(lines)
    return float(sum(tokens * every / rate for rate in rates))


def replay_config(plan: ReplayPlan, folder: Path) -> dict[str, Any]:
    """The configuration of the replay in `folder`: computes as the run does, and nothing else."""
    tables = computing(plan.config)
    train, scheduler = dict(tables["train"]), dict(tables.get("scheduler", {}))
    scheduler.setdefault("total_steps", train["max_steps"])
    rules = {k: v for k, v in plan.config.get("resilience", {}).items() if k != "faults"}
    kept, integrity = plan.config.get("checkpoint", {}), plan.config.get("integrity", {})
    accepted = {k: v for k, v in kept.items() if k == "accept_changes"}
    return {
        **tables,
        "train": train | {"max_steps": plan.last},
        "scheduler": scheduler,
        "run": {"dir": str(folder.parent), "name": folder.name},
        "checkpoint": {"interval": plan.steps} | accepted,
        "distributed": plan.config.get("distributed", {}),
        "resilience": rules,
        "metrics": {"log_interval": 1},
        "integrity": {k: v for k, v in integrity.items() if k == "parts_interval"},
        "profiling": _numerics(plan, folder) if plan.traced else {},
    }


def _numerics(plan: ReplayPlan, folder: Path) -> dict[str, Any]:
    return {"numerics": str(trace_of(folder)), "numerics_from": plan.first}


def trace_of(replay: Path) -> Path:
    """Where the ranks of a replay record what its steps compute."""
    return replay.absolute() / "trace.jsonl"


def first_part(theirs: Path, here: Path, steps: range) -> str | None:
    """A sentence on the first part that differs in these steps between two parts.jsonl: a slot, the
    gradient of a parameter, a tensor of the state; None if none does. Of a repeated step the last
    line counts. Raises `OSError`."""
    one, other = _parts(theirs, steps), _parts(here, steps)
    for step in sorted(one.keys() & other.keys()):
        for kind, word in (("slots", "slot"), ("gradient", "the gradient of"), ("state", "")):
            ours, them = one[step].get(kind, {}), other[step].get(kind, {})
            if differing := [n for n in ours if n in them and ours[n] != them[n]]:
                named = f"{word} {differing[0]}".strip()
                more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
                of = f" of {len(ours)}, on {one[step]['ranks']} ranks," if kind == "slots" else ""
                return f"parts of step {step}: {named}{of} differs first{more}"
    return None


def _parts(file: Path, steps: range) -> dict[int, Line]:
    if not file.exists():
        return {}
    with file.open("rb") as lines:
        found = chain.from_iterable(map(parse_lines, lines))
        return {line["step"]: line for line in found if line.get("step") in steps}


def copy_trace(
    replay: Path, target: Path, documents: Callable[[int], list[int]] | None = None
) -> list[int]:
    """Copy the last whole record of each step of a replay; returns the steps, in order. An
    interrupted replay may have recorded some twice. Each micro batch gets the `documents` of its
    samples. Raises `OSError`, and as `documents`."""
    source = trace_of(replay)
    if not source.exists():
        target.write_bytes(b"")
        return []
    places = _records(source)
    with source.open("rb") as file, target.open("wb") as copy:
        for step in sorted(places):
            record = _read(file, places[step])
            copy.write(record if documents is None else _with_documents(record, documents))
    return sorted(places)


def _with_documents(record: bytes, documents: Callable[[int], list[int]]) -> bytes:
    lines = list(parse_lines(record))
    for line in lines:
        if line.get("kind") == "batch":
            line["documents"] = [documents(sample) for sample in line["samples"]]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def traced_steps(trace: Path) -> dict[int, list[Line]]:
    """The lines of the last whole record of each step, by step. Raises `OSError`."""
    places = _records(trace)
    with trace.open("rb") as file:
        return {step: list(parse_lines(_read(file, place))) for step, place in places.items()}


def _read(file: BinaryIO, place: tuple[int, int]) -> bytes:
    start, end = place
    file.seek(start)
    return file.read(end - start)


def _records(trace: Path) -> dict[int, tuple[int, int]]:
    """The first and the last byte of the last whole record of each step, which begins with a line
    of the step itself, and has as many more as that says."""
    found: dict[int, tuple[int, int]] = {}
    step: int | None = None
    start = end = left = 0
    with trace.open("rb") as file:
        for line in file:
            end, left = end + len(line), left - 1
            entry = next(parse_lines(line), None)
            if entry is None:  # torn, or between two records
                step = None
            elif entry.get("kind") == "step":
                step, start, left = entry["step"], end - len(line), entry["lines"]
            if step is not None and left == 0:
                found[step] = start, end
    return found


@dataclass(frozen=True)
class ReplayedStep:
    """A step that both runs have logged; `differing` are the values that differ, theirs and the
    replay's, by name."""

    step: int
    differing: Mapping[str, tuple[object, object]]

    def between(self, theirs: str, here: str) -> str:
        """A sentence; where the two were computed, in words."""
        parts = [f"{name} {one} {theirs}, {other} {here}" for name, (one, other) in
                self.differing.items()]  # fmt: skip
        return f"step {self.step} differs: {'; '.join(parts)}"


def compare_steps(theirs: Mapping[int, Line], here: Mapping[int, Line]) -> list[ReplayedStep]:
    """The steps that both have, in order."""
    return [
        ReplayedStep(
            step,
            {
                name: (theirs[step][name], here[step][name])
                for name in COMPARED
                if name in theirs[step] and name in here[step]
                and theirs[step][name] != here[step][name]
            },
        )
        for step in sorted(theirs.keys() & here.keys())
    ]  # fmt: skip
