"""Runs a program undisturbed, then with stops and kills at its boundaries, and collects the records
of its ranks and digests of the tensor files that it writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

import xxhash

from kempner.cluster.network.ports import free_port
from kempner.rehearse.compare import RankRecord, differences, read_record
from kempner.run.control.rehearsal import RehearsalPart
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.supervisor.launchers.fork_server.client import CannotForkError, ForkServerClient
from kempner.supervisor.launchers.fork_server.server import arguments_of_python

RANK = "kempner.training.rehearsal.rank"

MODULES = (
    *("torch", "numpy", "torch.utils.data", "kempner.training.survive"),
    "kempner.training.rehearsal.recorder",
)
"""Modules that the ranks need anyway: they are forked from a process that has imported them."""

AFTER_A_DEATH = 5.0
"""Seconds that the other ranks have after one has died."""

SILENCED = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "COMET_AUTO_LOG_DISABLE": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that disable trackers in a rehearsal. MLflow has none for this: it gets a folder."""


class StartedRank(Protocol):
    """A rank's process, running or ended."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...


class Stage:
    """Starts ranks, by two fork servers with different hash seeds: a forked process iterates over
    sets of strings in the order of its server, which otherwise differs in each process."""

    def __init__(self) -> None:
        self._servers = [ForkServerClient(MODULES) for _ in range(2)]

    @contextmanager
    def open(self) -> Iterator[Stage]:
        before = os.environ.get("PYTHONHASHSEED")
        try:
            for number, server in enumerate(self._servers, 1):
                if before is None:
                    os.environ["PYTHONHASHSEED"] = str(number)
                server.start()
        finally:
            if before is None:
                os.environ.pop("PYTHONHASHSEED", None)
        try:
            yield self
        finally:
            for server in self._servers:
                server.close()

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        outputs: Sequence[Path],
        other_order: bool,
    ) -> list[int]:
        """Run a rank for each of `outputs`, to which it prints; returns their exit codes."""
        places = _places(len(outputs))
        started: list[StartedRank] = []
        try:
            for place, output in zip(places, outputs, strict=True):
                environ = {**os.environ, **SILENCED, **variables, **place}
                with open(output, "ab") as file:
                    started.append(self._start(command, environ, file, other_order))
            return _wait(started)
        finally:
            _kill(started)

    def _start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: BinaryIO,
        other_order: bool,
    ) -> StartedRank:
        hash_seed = {"PYTHONHASHSEED": str(1 + other_order)}
        arguments = arguments_of_python(command)
        if arguments is not None:
            ours = [sys.executable, "-m", RANK, *arguments]
            with suppress(CannotForkError):
                return self._servers[other_order].fork(
                    ours, environ, (output.fileno(),) * 2, ours=True
                )
            command = ours
        return subprocess.Popen(
            command,
            env={**hash_seed, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _places(size: int) -> list[dict[str, str]]:
    """Torch's variables for each rank, on this machine."""
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1", uuid4().hex)),
        "TORCHELASTIC_RUN_ID": "rehearsal",  # makes these variables count
    }
    return [{**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(size)]


def _wait(started: Sequence[StartedRank]) -> list[int]:
    """Wait until all have ended; after a death, kill the others."""
    until = None
    while None in (codes := [rank.poll() for rank in started]):
        if until is None and any(code not in (None, 0, ExitCode.STOPPED) for code in codes):
            until = time.monotonic() + AFTER_A_DEATH
        if until is not None and time.monotonic() > until:
            _kill(started)
        time.sleep(0.02)
    return [rank.wait() or 0 for rank in started]


def _kill(started: Sequence[StartedRank]) -> None:
    """Kill what still runs, with all that it has started."""
    for rank in started:
        if rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


OF_TENSORS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npy", ".npz"}
"""Suffixes of files with tensors."""

DEEPEST, MOST_FILES, LARGEST = 4, 5000, 1 << 28


@dataclass(frozen=True)
class FileDigests:
    """Digests of files by their paths."""

    digests: Mapping[str, str] = field(default_factory=dict)

    def differing(self, other: FileDigests) -> list[str]:
        """The files that both have, with other contents."""
        common = self.digests.keys() & other.digests.keys()
        return sorted(path for path in common if self.digests[path] != other.digests[path])


def listing(folder: Path, scratch: Path) -> dict[str, tuple[int, int]]:
    """Time and size of the files below a folder, within limits of depth and number."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, names in os.walk(folder):
        here = Path(place)
        deep = len(here.relative_to(folder).parts) >= DEEPEST
        over = {
            f for f in folders if f.startswith(".") or f == "__pycache__" or here / f == scratch
        }
        folders[:] = [] if deep else [f for f in folders if f not in over]
        for name in names:
            path = here / name
            if path.is_symlink() or len(found) >= MOST_FILES:
                continue
            facts = path.stat()
            found[str(path)] = (facts.st_mtime_ns, facts.st_size)
    return found


def contents_of(
    records: Iterable[RankRecord], before: Mapping[str, tuple[int, int]], scratch: Path
) -> FileDigests:
    """Digests of the tensor files that the program has written, by its records and its folder."""
    paths = {Path(path) for record in records for path in record.wrote if Path(path).is_file()}
    now = listing(Path.cwd(), scratch)
    paths |= {Path(path) for path, facts in now.items() if before.get(path) != facts}
    held = [p for p in sorted(paths) if p.suffix in OF_TENSORS and p.stat().st_size <= LARGEST]
    return FileDigests({str(p): xxhash.xxh3_64_hexdigest(p.read_bytes()) for p in held})


MOST_STOPS = 5
"""Most disturbances of a rehearsal."""


@dataclass(frozen=True)
class Disturbance:
    """A stop, or with `kills` a kill, in `step`; `what` describes the step."""

    step: int
    kills: bool
    what: str

    @property
    def words(self) -> str:
        how = f"killed in step {self.step}" if self.kills else f"stopped after step {self.step}"
        return f"{how} ({self.what})" if self.what else how


def plan(record: RankRecord) -> list[Disturbance]:
    """The disturbances of a run, in order: first a stop, and at least one kill. A stop falls on a
    boundary, a kill into the step after one. Raises `ValueError` if there are too few steps."""
    first, last = record.first + 1, record.last - 2
    if last < first:
        raise ValueError("too few steps")
    marks = {step: what for step, what in sorted(boundaries(record).items()) if step <= last}
    if len(marks) < 2:
        for step in (first + (last - first) // 3, first + 2 * (last - first) // 3):
            marks.setdefault(step, "")
    chosen: list[Disturbance] = []
    for step, what in sorted(marks.items()):
        kills = len(chosen) % 2 == 1
        at = step + 1 if kills else step
        if chosen and at <= chosen[-1].step:
            continue
        after = what.replace("an epoch ends", "the end of an epoch")
        words = f"after {after}" if kills and what else what
        chosen.append(Disturbance(min(at, record.last - 1), kills, words))
    if len(chosen) == 1:
        chosen.append(Disturbance(min(chosen[0].step + 2, record.last), kills=True, what=""))
    # At most MOST_STOPS, including the first and the last.
    return chosen if len(chosen) <= MOST_STOPS else [*chosen[: MOST_STOPS - 1], chosen[-1]]


def boundaries(record: RankRecord) -> dict[int, str]:
    """The first and the last step before an end of an epoch, a save and an evaluation."""
    last = record.last
    found = {
        "an epoch ends": epoch_ends(record),
        "a save": record.saved,
        "an evaluation": _if_rare([s for s, seen in record.evaluations.items() if seen], last),
    }
    marks: dict[int, str] = {}
    for what, steps in found.items():
        inner = [step for step in steps if record.first < step < last - 1]
        for step in {*inner[:1], *inner[-1:]}:
            marks[step] = f"{marks[step]}, {what}" if step in marks else what
    return marks


def epoch_ends(record: RankRecord) -> list[int]:
    """The steps after which samples repeat."""
    seen: set[str] = set()
    ends = []
    for step, done in sorted(record.done.items()):
        if seen.intersection(done.samples):
            ends.append(step - 1)
            seen.clear()
        seen.update(done.samples)
    return _if_rare(ends, record.last)


def _if_rare(steps: Sequence[int], last: int) -> list[int]:
    """`steps`, or nothing if that is every second step or more often."""
    return list(steps) if len(steps) * 2 <= last else []


@dataclass(frozen=True)
class ObservedStart:
    """One start of the program, and the records of its ranks."""

    part: RehearsalPart
    records: tuple[RankRecord, ...]
    codes: tuple[int, ...]
    folder: Path

    @property
    def first(self) -> int:
        return self.records[0].first

    @property
    def last(self) -> int:
        return self.records[0].last

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than planned."""
        expected = {0, int(ExitCode.STOPPED)}
        return not self.part.kills and not expected.issuperset(self.codes)

    def printed_lines(self) -> list[str]:
        """The lines that the ranks have printed, rank by rank."""
        outputs = sorted(self.folder.glob("rank-*.out"))
        return [
            line for path in outputs for line in path.read_text("utf-8", "replace").splitlines()
        ]


@dataclass
class RehearsalRecord:
    """All records of a rehearsal."""

    undisturbed: ObservedStart
    disturbances: list[Disturbance] = field(default_factory=list)
    starts: list[ObservedStart] = field(default_factory=list)
    """One for each disturbance, which ends it, and a last one until the end."""
    again: ObservedStart | None = None
    """A second undisturbed run, if the first start differed before any disturbance."""
    elsewhere: ObservedStart | None = None
    """The start on another number of ranks, after the first stop."""
    contents: tuple[FileDigests, FileDigests] = (FileDigests(), FileDigests())
    """The tensor files that the program wrote elsewhere: undisturbed, and at the end."""


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal of `command` for `steps` steps on `size` ranks, in the folder `scratch`."""

    command: Sequence[str]
    steps: int
    size: int
    scratch: Path
    stage: Stage
    tell: Callable[[str], None]

    def run(self) -> RehearsalRecord:
        """Run all starts. Raises `UsageError` if the program makes no steps that can be
        recorded."""
        before = listing(Path.cwd(), self.scratch)
        first = self._run_start("undisturbed", self.steps)
        seen = RehearsalRecord(first)
        if first.failed:
            return seen
        self._check(first)
        seen.disturbances = plan(first.records[0])
        written = contents_of(first.records, before, self.scratch)
        self._disturb(seen)
        if seen.starts[-1].failed:
            return seen
        seen.contents = written, contents_of(first.records, before, self.scratch)
        if differences(seen.undisturbed.records, seen.starts[0].records):
            self.tell("it differs before any disturbance: once more undisturbed")
            seen.again = self._run_start("again", self.steps)
        return seen

    def _disturb(self, seen: RehearsalRecord) -> None:
        for number, disturbance in enumerate([*seen.disturbances, None], 1):
            at = self.steps if disturbance is None else disturbance.step
            kills = disturbance is not None and disturbance.kills
            self.tell(f"start {number}: {disturbance.words if disturbance else 'to the end'}")
            start = self._run_start(f"start-{number}", at, kills=kills, run="disturbed", other=True)
            seen.starts.append(start)
            if start.failed:
                return
            if number == 1 and self.size > 1:
                self._resume_on_half_the_ranks(seen)

    def _resume_on_half_the_ranks(self, seen: RehearsalRecord) -> None:
        """Resume a copy of the run after the first stop on half as many ranks."""
        shutil.copytree(self.scratch / "disturbed", self.scratch / "elsewhere", symlinks=True)
        size = self.size // 2
        self.tell(f"start 2, as well on {size} of {self.size} ranks")
        smaller = replace(self, size=size)
        seen.elsewhere = smaller._run_start("elsewhere-2", self.steps, run="elsewhere")

    def _run_start(
        self, name: str, at: int, kills: bool = False, run: str = "", other: bool = False
    ) -> ObservedStart:
        """Run the program until the disturbance in step `at`, or until it is complete."""
        folder = self.scratch / f"part-{name}"
        folder.mkdir()
        part = RehearsalPart(
            str(folder), str(self.scratch / (run or name)), at, kills, str(Path.cwd())
        )
        outputs = [folder / f"rank-{rank}.out" for rank in range(self.size)]
        variables = {**part.environment(), "MLFLOW_TRACKING_URI": f"file:{self.scratch}/mlflow"}
        codes = self.stage.run(self.command, variables, outputs, other)
        records = [read_record(folder / f"rank-{rank}.jsonl") for rank in range(self.size)]
        return ObservedStart(part, tuple(records), tuple(codes), folder)

    def _check(self, first: ObservedStart) -> None:
        if not first.records[0].done:
            raise UsageError(
                "rehearse: the program ended without a step that can be seen: it needs "
                "survive(...) or one of kempner's integrations (docs/own_loop.md)"
            )
        if first.last < 5:
            raise UsageError(
                f"rehearse: the program ended after {first.last} steps: at least 5 are needed"
            )
