"""The power fails at any moment of a save: what the disk may then hold is always enough.

One save after the other is traced, and from the trace are made the states in which a file system
may legally come back. In each of them the selection, verification and load of a resume must find
what was reported as safe, and never half a checkpoint.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from disk import Disk, Tree, digest, look, put
from drill import SMALLEST, Trace, held, reported, resume_each, trace
from drilling import ALL, SEED, note
from harness import Run, drills
from planted_bugs import BUGS
from promises import broken, resumable
from tracer import Call, supported

from kempner.checkpoint.format.names import CheckpointFolder, parse_step

pytestmark = [
    pytest.mark.timeout(1800 if ALL else 300),  # the traced run is slow on a busy machine
    pytest.mark.skipif(not supported(), reason="the tracer knows the system calls of x86_64 only"),
]

STATES = 4_000 if ALL else 1_000
STATES_WITH_A_BUG = 50
LOADED = 50 if ALL else 10
AS_A_GRANDCHILD = ("sh", "-c", '"$@"; exit $?', "sh")  # the tracer alone waits for it
KEEP = 2
OFTEN = ("--checkpoint.interval=6", *SMALLEST)
SAVES = ("--train.max_steps=24", *OFTEN)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trace:
    """A run of two ranks and four saves, two of which let an older one go."""
    run = Run(tmp_path_factory.mktemp("traced") / "run", corpus)
    return trace(run, run.supervise(2, *SAVES, **held(2)), 2)


@dataclass(frozen=True)
class CrashState:
    """What is left on the disk, and the last step that the run had reported as committed."""

    tree: Tree
    reported: int | None


def crash_states(traced: Trace, wanted: int, random: Random) -> Iterator[CrashState]:
    """Distinct states, as many from one moment as from the next."""
    moments = sum(call.result >= 0 for call, _ in saving(traced))
    seen: dict[bytes, int | None] = {}
    while len(seen) < wanted:
        before, disk, last = len(seen), Disk(traced.run.checkpoints), None
        for call, _ in traced.calls:
            last = reported(call, traced.run) or last
            disk.apply(call)
            if call.result < 0 or not is_saving(call, traced.run):
                continue
            for _ in range(max(1, wanted // moments)):
                tree = disk.after_power_loss(random)
                name = digest(tree)
                if seen.get(name, 0) != last:  # what was reported since must be in it, too
                    seen[name] = last
                    yield CrashState(tree, last)
        assert len(seen) > before, f"there are only {before} states"


def is_saving(call: Call, run: Run) -> bool:
    return call.path.startswith((str(run.record.attempts), str(run.checkpoints)))


def saving(traced: Trace) -> list[tuple[Call, int]]:
    """The calls that have to do with checkpoints, each with its rank."""
    return [(call, rank) for call, rank in traced.calls if is_saving(call, traced.run)]


def violations(traced: Trace, wanted: int, folder: Path) -> Counter[str]:
    """How often which promise is broken, over many crash states."""
    found: Counter[str] = Counter()
    for state in crash_states(traced, wanted, Random(SEED)):
        put(state.tree, folder)
        found.update(broken(folder, state.reported))
        shutil.rmtree(folder)
    return found


def test_the_model_of_the_disk_ends_where_the_disk_did(traced: Trace) -> None:
    disk = Disk(traced.run.checkpoints)
    for call, _ in traced.calls:
        disk.apply(call)
    assert disk.now() == look(traced.run.checkpoints)


def test_every_state_that_a_power_loss_may_leave_holds_what_was_reported(
    traced: Trace, tmp_path: Path
) -> None:
    found = violations(traced, STATES, tmp_path / "crashed")
    note("power loss", states=STATES, calls=len(saving(traced)), violations=found)
    assert not found


@pytest.mark.parametrize("bug", [*sorted(BUGS)[:1], *drills(*sorted(BUGS)[1:])])
def test_a_planted_bug_is_caught(run: Run, tmp_path: Path, bug: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("planted_bugs.py")), bug, "train"]
    job = run.start([*AS_A_GRANDCHILD, *program], "--train.max_steps=12", *OFTEN, **held(1))
    found = violations(trace(run, job, 1), STATES_WITH_A_BUG, tmp_path / "crashed")
    note(
        "power loss, planted bug",
        bug=bug,
        states=STATES_WITH_A_BUG,
        violations=found.total(),
        first=next(iter(found), ""),
    )
    assert found


def test_a_real_resume_loads_what_a_power_loss_leaves(traced: Trace, tmp_path: Path) -> None:
    states = list(crash_states(traced, STATES // 4, Random(SEED)))
    expected: dict[str, int | None] = {}
    for number, state in enumerate(Random(SEED).sample(states, LOADED)):
        checkpoints = tmp_path / f"run-{number}" / "checkpoints"
        checkpoints.parent.mkdir()
        put(state.tree, checkpoints)
        expected[str(checkpoints.parent)] = resumable(CheckpointFolder(checkpoints))
    steps = resume_each(traced.run.config, SAVES, expected)
    note("power loss, real resumes", resumed_at=steps)
    assert steps == [step or 0 for step in expected.values()]
    assert len(set(steps)) > 1  # not all of them lead to the same


def test_a_save_makes_durable_what_it_should_in_the_promised_order(traced: Trace) -> None:
    root = str(traced.run.checkpoints)
    calls = [call for call, _ in saving(traced) if call.result >= 0]
    latest = f"{root}/latest"

    def where(name: str, path: str, after: int = -1) -> int:
        """The first such call after the one at index `after`."""
        return next(
            at
            for at, call in enumerate(calls)
            if at > after and (call.name, call.path) == (name, path)
        )

    def last_written(path: str) -> int:
        kinds = ("write", "pwrite64", "fallocate", "openat")
        return max(at for at, call in enumerate(calls) if call.path == path and call.name in kinds)

    commits = [call for call in calls if call.name == "rename" and step_of(call.target)]
    assert [step_of(call.target) for call in commits] == [6, 12, 18, 24]
    safe: dict[int, int] = {}
    """From which call on which step is durable."""
    for commit in commits:
        folder, manifest = commit.path, f"{commit.path}/manifest.json"
        begun = where("openat", manifest)
        ranks_files = ("__0_0.distcp", "__1_0.distcp", "sums-00000.json", "sums-00001.json")
        for name in (*ranks_files, "index.json", ".metadata"):
            assert last_written(f"{folder}/{name}") < where("fsync", f"{folder}/{name}") < begun
        assert last_written(manifest) < (at := where("fsync", manifest))
        named = where("rename", folder)
        assert at < where("fsync", folder, at) < named
        swap = next(at for at, call in enumerate(calls) if at > named and call.target == latest)
        assert named < where("fsync", root, named) < swap
        durable = where("fsync", root, swap)
        safe[durable] = step_of(commit.target)
    for at, step in (gone := deletions(calls)):
        newer = [other for since, other in safe.items() if since < at and other > step]
        assert len(newer) >= KEEP, (step, newer)
    assert gone
    note("the order of a save", commits=len(commits), deletions=len(gone))


def deletions(calls: list[Call]) -> list[tuple[int, int]]:
    """Where a committed manifest, and with it the checkpoint, goes; and of which step."""
    return [
        (at, step)
        for at, call in enumerate(calls)
        if call.name in ("rename", "unlink") and call.path.endswith("/manifest.json")
        if (step := step_of(str(Path(call.path).parent))) is not None
    ]


def step_of(path: str) -> int | None:
    return parse_step(Path(path).name)


def test_nothing_committed_is_ever_opened_for_writing(traced: Trace) -> None:
    changing = {"write", "pwrite64", "fallocate", "ftruncate"}
    root = f"{traced.run.checkpoints}/"
    written = [
        call.path.removeprefix(root).split("/")[0]
        for call, _ in saving(traced)
        if call.path.startswith(root) and (call.name in changing or call.opens_for_writing)
    ]
    assert not [name for name in written if name == "latest" or parse_step(name) is not None]
    note("nothing committed is written to", calls_that_write=len(written))
    assert written
