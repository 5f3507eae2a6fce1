"""A loop of the user's own under `kempner supervise -- COMMAND`: the example, and worse ones."""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
import warm
from drilling import SEED, note
from harness import KEMPNER, ROOT, Job, assert_named, wait_until

from kempner.run.process.exit_codes import StopReason
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(300)

EXAMPLES = ROOT / "docs" / "examples"
STEPS = 200

FORKED = ("--supervise.fork_imports=['torch', 'kempner.training.survive']",)
"""As the documentation advises who finds the start of a rank too slow; without it, ranks are
processes of their own.
"""


@dataclass
class Own:
    """Programs of a user, started in a folder of their own."""

    folder: Path
    jobs: list[Job] = field(default_factory=list)

    def supervise(self, *program: object, options: tuple[str, ...] = (), nproc: int = 2) -> Job:
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"job-{len(self.jobs)}.out"
        command = [*KEMPNER, "supervise", f"--nproc={nproc}", *options, "--", *map(str, program)]
        with open(log, "wb") as out:
            process = warm.start(command, os.environ, out, self.folder, spare=True)
        self.jobs.append(Job(process, log))
        return self.jobs[-1]

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / name)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.run(name).ledger) if e["event"] == event]

    def losses(self) -> dict[int, str]:
        """What rank 0 printed for each step, the last time that it did. Its supervisor may write
        before the end of the line has come."""
        text = "".join(job.output() for job in self.jobs)
        found = re.findall(r"^step (\d+) loss ([\d.]+(?:e-\d+)?)", text, re.M)
        return {int(n): loss for n, loss in found}

    def reach(self, step: int, job: Job) -> None:
        wait_until(lambda: max(self.losses(), default=0) >= step, f"step {step}", job=job)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Own]:
    """Whatever it leaves running is killed."""
    own = Own(tmp_path / "own")
    yield own
    for job in own.jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


def example() -> tuple[str, Path]:
    return sys.executable, EXAMPLES / "surviving.py"


def test_the_page_shows_what_the_example_needs() -> None:
    plain, surviving = ((EXAMPLES / f).read_text() for f in ("plain.py", "surviving.py"))
    changes = difflib.unified_diff(plain.splitlines(), surviving.splitlines(), n=1, lineterm="")
    shown = [line for line in list(changes)[2:] if not line.startswith("@@")]
    page = (ROOT / "docs" / "own_loop.md").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", page, re.S)
    assert [block.splitlines() for block in blocks] == [shown]
    (of_slots,) = re.findall(r"```python\n(    slots = .*?)```", page, re.S)
    assert of_slots in (EXAMPLES / "any_world.py").read_text()
    assert 50 < len(plain.splitlines()) < 75
    assert sum(line.startswith("+") for line in shown) <= 10


def test_the_example_survives_a_stop_and_a_kill_to_the_last_bit(own: Own, tmp_path: Path) -> None:
    undisturbed = Own(tmp_path / "undisturbed")
    assert undisturbed.supervise(*example()).wait(200) == 0, undisturbed.jobs[0].output()

    job = own.supervise(*example(), options=FORKED)
    own.reach(30, job)
    job.signal()
    assert job.wait() == 75, job.output()
    (stopped,) = own.events("surviving", "stopped")
    assert stopped["lost_steps"] == 0
    assert_named(own.run("surviving"), StopReason.SIGNAL, 1, 2, job.output())
    assert not (own.folder / "curve.pt").exists()

    job = own.supervise(*example(), options=FORKED)
    own.reach(stopped["step"] + 45, job)
    log = own.run("surviving").log(2, 1)
    (victim,) = [e["pid"] for e in read_lines(log) if e["event"] == "ready"]
    os.kill(victim, signal.SIGKILL)
    assert job.wait(200) == 0, job.output()
    (restarting,) = own.events("surviving", "restarting")
    assert "rank 1 was killed by SIGKILL at step" in restarting["reason"]
    assert [e["step"] for e in own.events("surviving", "completed")] == [STEPS]

    assert sorted(own.losses()) == list(range(1, STEPS + 1))
    assert own.losses() == undisturbed.losses()
    ours, theirs = (torch.load(o.folder / "curve.pt") for o in (own, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Own:
    """The example with slots, on one rank."""
    alone = Own(tmp_path_factory.mktemp("slots") / "alone")
    program = sys.executable, EXAMPLES / "any_world.py"
    assert alone.supervise(*program, nproc=1).wait(200) == 0, alone.jobs[0].output()
    return alone


def test_with_slots_a_loop_is_the_same_on_any_number_of_ranks(own: Own, alone: Own) -> None:
    """Three ranks, of which one is killed, then one, then two: six slots are shared evenly, but are
    no power of two."""
    program = sys.executable, EXAMPLES / "any_world.py"
    job = own.supervise(*program, nproc=3)
    own.reach(60, job)
    log = own.run("any_world").log(1, 1)
    (victim,) = [e["pid"] for e in read_lines(log) if e["event"] == "ready"]
    os.kill(victim, signal.SIGKILL)
    own.reach(120, job)
    job.signal()
    assert job.wait() == 75, job.output()
    job = own.supervise(*program, nproc=1)
    own.reach(max(own.losses()) + 40, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert own.supervise(*program).wait(200) == 0, own.jobs[-1].output()
    assert len(own.events("any_world", "restarting")) == 1
    assert_same(own, alone)


def test_with_slots_shards_are_the_same_as_a_model_that_is_whole(own: Own, alone: Own) -> None:
    program = sys.executable, EXAMPLES / "any_world.py", "--shard"
    job = own.supervise(*program, nproc=3)
    own.reach(120, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert own.supervise(*program).wait(200) == 0, own.jobs[-1].output()
    assert_same(own, alone)


def assert_same(ours: Own, theirs: Own) -> None:
    assert sorted(ours.losses()) == list(range(1, 401))
    assert ours.losses() == theirs.losses()
    weights, others = (torch.load(each.folder / "curve.pt") for each in (ours, theirs))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in others)


MESHES = ["plain", "1x1", "1x2", "2x1", "1x3", "1x4", "2x2", "1x5", "2x4", "1x8"]


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_with_slots_stops_between_any_meshes_change_no_bit(own: Own, tmp_path: Path) -> None:
    """Nine stops at random steps, each mesh once, in a random order: 120 steps."""
    program = sys.executable, Path(__file__).with_name("slots_on_meshes.py"), "survive", 120
    whole = Own(tmp_path / "whole")

    def on(mesh: str, run: Own) -> Job:
        run.folder.mkdir(exist_ok=True)
        (run.folder / "mesh").write_text(mesh)
        ranks = 1 if mesh == "plain" else math.prod(map(int, mesh.split("x")))
        return run.supervise(*program, nproc=ranks, options=FORKED)

    def told(run: Own) -> dict[int, str]:
        text = "".join(job.output() for job in run.jobs)
        return {int(n): bits for n, bits in re.findall(r"^step (\d+) (\S+ \S+ \S+)\n", text, re.M)}

    assert on("plain", whole).wait(300) == 0, whole.jobs[0].output()
    random = Random(SEED)
    meshes = random.sample(MESHES, len(MESHES))
    for mesh, until in zip(meshes, [*sorted(random.sample(range(2, 110), 9)), 120], strict=True):
        job = on(mesh, own)
        if until < 120:
            goal = max([until, *(step + 1 for step in told(own))])
            wait_until(lambda goal=goal: max(told(own), default=0) >= goal, f"{goal}", job=job)
            job.signal()
        assert job.wait(300) == (75 if until < 120 else 0), job.output()
    assert sorted(told(own)) == list(range(1, 121))
    assert told(own) == told(whole)
    note("slots in a loop", meshes=" ".join(meshes), steps=120, stops=9, equal=True)


@pytest.mark.drill
def test_a_program_that_always_dies_at_step_30_is_given_up(own: Own) -> None:
    program = Path(__file__).with_name("dies_at_step_30.py")
    job = own.supervise(sys.executable, program)
    assert job.wait(120) == 1, job.output()
    (verdict,) = own.events("dies_at_step_30", "gave_up")
    assert (verdict["rank"], verdict["step"], verdict["attempt"]) == (1, 30, 2)
    assert verdict["raised"] == "ValueError: there is no batch 30"
    assert "It fails at step 30 every time" in job.output()
    assert "ValueError: there is no batch 30" in job.output()
    (output,) = [Path(p) for p in verdict["see"] if p.endswith(".out")]
    assert "Traceback" in (own.folder / output).read_text()


def test_a_state_that_no_checkpoint_holds_ends_the_run_after_the_first_step(own: Own) -> None:
    program = Path(__file__).with_name("keeps_lists.py")
    job = own.supervise(sys.executable, program, options=FORKED)
    assert job.wait(120) == 2, job.output()
    assert "is of type list; a checkpoint only holds tensors" in job.output()
    assert "Traceback" not in job.output(), job.output()
    assert "step 1 is done" in job.output()
    assert "step 2 is done" not in job.output()
    (ended,) = own.events("keeps_lists", "attempt_ended")  # and it is not tried again
    assert ended["exits"] == {"0": 2, "1": 2}


def test_how_a_loop_in_a_thread_ends_is_how_its_process_ends(own: Own) -> None:
    """Python ends it with 0 whatever becomes of a thread, and the run would pass for complete."""
    program = Path(__file__).with_name("in_a_thread.py")
    job = own.supervise(sys.executable, program, nproc=1)
    own.reach(30, job)
    job.signal()
    assert job.wait() == 75, job.output()
    (stopped,) = own.events("in_a_thread", "stopped")
    assert stopped["lost_steps"] == 0

    once = ("--supervise.max_restarts_without_progress=0", "--run.name=fails", *FORKED)
    job = own.supervise(sys.executable, program, "fails", nproc=1, options=once)
    assert job.wait() == 1, job.output()
    (verdict,) = own.events("fails", "gave_up")
    assert verdict["raised"] == "ValueError: there is no batch"


def test_ranks_that_leave_their_loop_together_commit_and_go_on_later(own: Own) -> None:
    program = Path(__file__).with_name("leaves_loop.py")
    job = own.supervise(sys.executable, program, "together", options=FORKED)
    assert job.wait(120) == 0, job.output()
    assert "left after step 4 of 10" in job.output()
    assert [(e["step"], e["steps"]) for e in own.events("leaves_loop", "left")] == [(4, 10)]
    assert not own.events("leaves_loop", "completed")
    job = own.supervise(sys.executable, program, "together", options=FORKED)
    assert job.wait(120) == 0, job.output()
    assert "resumed at step 4" in job.output()
    assert [e["step"] for e in own.events("leaves_loop", "completed")] == [10]


def test_a_rank_that_leaves_its_loop_alone_is_named_and_the_others_do_not_hang(own: Own) -> None:
    program = Path(__file__).with_name("leaves_loop.py")
    job = own.supervise(sys.executable, program, "alone", options=FORKED)
    assert job.wait(120) == 2, job.output()
    said = "rank 1 has left the loop after step 4, and rank 0 has not: leave it on all ranks"
    # The other may stand in a collective of its own, which then fails: the last word is the cause.
    assert said in job.output().splitlines()[-1]


FOREIGN = """
import os, sys, time
folder = os.path.join("ranks", os.environ["KEMPNER_ATTEMPT"])
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
    print(os.getpid(), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], file=file)
if sys.argv[1] == "flaky" and os.environ["KEMPNER_ATTEMPT"] == os.environ["RANK"] == "1":
    sys.exit("this went wrong")
time.sleep(0 if sys.argv[1] == "flaky" else 1000)
"""


@pytest.fixture
def foreign(own: Own) -> Path:
    """A program that knows nothing of kempner."""
    own.folder.mkdir()
    (own.folder / "foreign.py").write_text(FOREIGN)
    return Path("foreign.py")


def ranks_of(own: Own, attempt: int, job: Job) -> list[psutil.Process]:
    files = [own.folder / "ranks" / str(attempt) / str(rank) for rank in (0, 1)]
    wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files), "", job=job)
    told = [file.read_text().split() for file in files]
    assert [words[1:] for words in told] == [["2", "0"], ["2", "1"]]
    return [psutil.Process(int(words[0])) for words in told]


def test_a_program_that_knows_nothing_of_kempner_is_started_again(own: Own, foreign: Path) -> None:
    job = own.supervise(sys.executable, foreign, "flaky")
    assert job.wait() == 0, job.output()
    (failed,) = own.events("foreign", "attempt_failed")
    assert failed["attempt"] == 1
    (ended,) = (e for e in own.events("foreign", "attempt_ended") if e["attempt"] == 1)
    assert (ended["culprit"], ended["exits"]["1"]) == (1, 1)


def test_a_program_that_knows_nothing_of_kempner_is_stopped(own: Own, foreign: Path) -> None:
    # No rank ever reports: with this ceiling one that had to would be taken for hung.
    job = own.supervise(
        *(sys.executable, foreign, "wait"),
        options=("--resilience.hang_timeout_min=0.1", "--resilience.hang_timeout_max=0.1"),
    )
    ranks = ranks_of(own, 1, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert not any(rank.is_running() for rank in ranks)
    assert not own.events("foreign", "hang")


def test_a_program_does_not_outlive_its_supervisor(own: Own, foreign: Path) -> None:
    job = own.supervise(sys.executable, foreign, "wait")
    ranks = ranks_of(own, 1, job)
    job.signal(signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not any(rank.is_running() for rank in ranks), "the ranks to be gone")


INNER = """
import os, signal, subprocess, sys, time
def stop(*_):
    with open(f"stopped-{os.environ['RANK']}", "w") as file:
        print("committed", file=file)
    sys.exit(0)
if sys.argv[1] == "traps":
    signal.signal(signal.SIGTERM, stop)
with open("pids", "a") as file:
    print(os.getpid(), file=file)
# A daemon in a session of its own, without parents and without our environment, that heeds nothing.
daemon = "trap '' TERM HUP INT; echo $$ >> pids; while :; do sleep 1; done"
subprocess.run(["env", "-i", "setsid", "-f", "bash", "-c", daemon], check=True)
while len(open("pids").read().splitlines()) < 2 * int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGKILL)  # the wrapper goes, and the program stays
time.sleep(1000)
"""


@pytest.fixture
def wrapped(own: Own) -> Iterator[Path]:
    """A shell script that runs a program which starts a daemon. No shell forwards a signal."""
    own.folder.mkdir()
    (own.folder / "inner.py").write_text(INNER)
    script = f'echo start\n"{sys.executable}" inner.py "$1"\necho end\n'
    (own.folder / "wrap.sh").write_text(script)
    yield Path("wrap.sh")
    for pid in pids(own):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(own: Own) -> list[int]:
    file = own.folder / "pids"
    return list(map(int, file.read_text().split())) if file.exists() else []


def family(own: Own, size: int, job: Job) -> list[psutil.Process]:
    """All that the ranks have started, but for the shells."""
    wait_until(lambda: len(pids(own)) == size, "all of them", job=job)
    return [psutil.Process(pid) for pid in pids(own)]


@pytest.mark.parametrize("kind", ["traps", "plain"])
def test_a_stop_reaches_the_program_in_a_wrapper_and_nothing_is_left(
    own: Own, wrapped: Path, kind: str
) -> None:
    job = own.supervise("bash", wrapped, kind, options=("--run.name=wrapped",))
    members = family(own, 4, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert [member for member in members if member.is_running()] == []
    stopped = sorted(path.name for path in own.folder.glob("stopped-*"))
    assert stopped == (["stopped-0", "stopped-1"] if kind == "traps" else [])


def test_nothing_of_a_failed_attempt_is_left_when_it_is_over(own: Own, wrapped: Path) -> None:
    options = ("--run.name=wrapped", "--supervise.max_restarts_without_progress=0")
    job = own.supervise("bash", wrapped, "fails", options=(*options, "--supervise.crash_grace=0"))
    members = family(own, 4, job)
    assert job.wait() == 1, job.output()
    assert [member for member in members if member.is_running()] == []
    assert own.events("wrapped", "attempt_ended")[0]["culprit"] == 1


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""As one that has process ids of its own."""

UNSHARES = shutil.which("unshare") and subprocess.run([*CONTAINER, "true"]).returncode == 0


@pytest.mark.parametrize(
    "container",
    [(), pytest.param(CONTAINER, marks=pytest.mark.skipif(not UNSHARES, reason="not allowed"))],
)
def test_a_loop_in_a_wrapper_commits_before_it_leaves(own: Own, container: tuple[str, ...]) -> None:
    own.folder.mkdir()
    python, loop = example()
    (own.folder / "wrap.sh").write_text(f'"{python}" "{loop}"\necho end\n')
    job = own.supervise(*container, "bash", "wrap.sh", options=("--run.name=wrapped",), nproc=1)
    own.reach(30, job)
    job.signal()
    assert job.wait() == 75, job.output()
    (stopped,) = own.events("wrapped", "stopped")
    assert (stopped["reason"], stopped["lost_steps"]) == ("signal", 0)
