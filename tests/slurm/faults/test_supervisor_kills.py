"""SIGKILL and SIGSTOP of the three processes that a job's batch process is split into."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from drilling import SEED, note
from harness import Run, made_once
from lab import Cluster
from submitting import LONG, STEPS, Project, assert_like

KEEPER, WATCHDOG = "kempner-keeper", "kempner-watch"

PARTS, JOBS, KILLS = 17, 4, 3
"""Parts of the drill, jobs beside each other in each, and kills of the supervisor of each job."""

INTERVAL = 5
"""Steps between two saves of the runs whose supervisor is killed."""

MANY = [
    f"--train.max_steps={15 * KILLS}",
    f"--checkpoint.interval={INTERVAL}",
    "--resilience.patience=60",
]
"""Overrides for a run that outlasts its kills. Of the patience a fifth is waited for a run that the
launch before was killed too early to make."""

LONGEST = {
    "start": 8.0,
    "training": 3.0,
    "save": 0.5,
    "stop": 3.0,
    "restart": 4.0,
    "requeue": 1.0,
}
"""The phases of a job, and how many seconds after the beginning of one its supervisor is killed at
the latest: a start, say, takes so long."""

IN_VAIN = 2
"""Launches in a row that may make no new step: after one more a job is not put back."""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _family(cluster: Cluster, job: str) -> dict[str, int]:
    """The keeper, the watchdog and the supervisor of a job, as numbered outside; not all of them
    where one is gone."""
    host = cluster.job(job).get("BatchHost", "")
    if host not in cluster.machines:
        return {}
    keepers = [p for p in cluster.machines[host].processes() if _name(p) == KEEPER]
    if len(keepers) != 1:
        return {}
    try:
        text = Path(f"/proc/{keepers[0]}/task/{keepers[0]}/children").read_text()
    except OSError:
        return {}
    found = {"keeper": keepers[0]}
    for child in map(int, text.split()):
        found["watchdog" if _name(child) == WATCHDOG else "supervisor"] = child
    return found


def _await_family(cluster: Cluster, project: Project, job: str, launch: int) -> dict[str, int]:
    """Those of a launch of a job, once all are there."""
    found: dict[str, int] = {}

    def there() -> bool:
        state = cluster.job(job)
        assert state["JobState"] not in ("FAILED", "COMPLETED"), "it has ended"
        if state["JobState"] != "RUNNING" or state["Restarts"] != str(launch):
            return False
        found.update(_family(cluster, job))
        return len(found) == 3

    project.wait_until(job, there, f"launch {launch}", 180.0)
    return found


def _steps(project: Project) -> list[int]:
    """Every step that was made, in the order in which it was."""
    return [row["step"] for row in project.run.metrics()]


@pytest.mark.timeout(600)
@pytest.mark.every_slurm
def test_the_watchdog_that_is_killed_or_stopped_harms_nothing(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*LONG, nodes=2)
    project.slow()
    first = _await_family(cluster, project, job, 0)
    os.kill(first["watchdog"], signal.SIGKILL)
    project.reach(job, 5)
    project.warn(job)
    second = _await_family(cluster, project, job, 1)
    (requeued,) = project.events("requeued")
    assert "supervisor" not in requeued["reason"]
    project.reach(job, requeued["step"] + 3)
    os.kill(second["watchdog"], signal.SIGSTOP)
    os.kill(second["supervisor"], signal.SIGKILL)  # its keeper wakes the watchdog
    project.hurry()
    project.end(job)
    assert cluster.job(job)["Restarts"] == "2"
    assert sorted(_steps(project)) == list(range(1, STEPS + 1))


@dataclass(frozen=True)
class SupervisorKill:
    """SIGKILL `after` seconds into a phase, of a supervisor that stood still for `still`."""

    phase: str
    after: float
    still: float


def _plan(part: int) -> list[SupervisorKill]:
    """About every fourth is where a phase begins, and every fourth of one that stands still."""
    random, kills = Random(f"{SEED}/{part}"), list[SupervisorKill]()
    for _ in range(KILLS):
        in_vain = [kill.phase for kill in kills[-IN_VAIN:]] == ["start"] * IN_VAIN
        phase = random.choice([name for name in LONGEST if not in_vain or name != "start"])
        after, still = (round(most * random.random(), 2) for most in (LONGEST[phase], 3.0))
        after, still = (
            value * (random.random() < odds) for value, odds in ((after, 0.75), (still, 0.25))
        )
        kills.append(SupervisorKill(phase, after, still))
    return kills


def _begin(phase: str, cluster: Cluster, project: Project, job: str) -> None:
    """Have a job that trains come into a phase, and wait until it has."""
    host = cluster.job(job)["BatchHost"]
    match phase:
        case "save":
            names = lambda: {path.name for path in project.run.checkpoints.glob("*")}  # noqa: E731
            before = names()
            project.wait_until(job, lambda: names() - before, "a save")
        case "restart":
            project.signal_ranks(host, signal.SIGKILL)
        case "stop":
            project.warn(job)
        case "requeue":
            project.warn(job)
            project.wait_until(job, lambda: not project.ranks(host), "the ranks have left")


def _kill(kill: SupervisorKill, supervisor: int) -> bool:
    """Whether it was still there."""
    try:
        if kill.still:
            signal.pidfd_send_signal(supervisor, signal.SIGSTOP)
            time.sleep(kill.still)
        signal.pidfd_send_signal(supervisor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(supervisor)
    return True


@dataclass
class Killed:
    """A job whose supervisor is killed again and again; what each kill was and led to, when, and
    how many steps it may cost."""

    cluster: Cluster
    project: Project
    job: str = ""
    kills: list[dict[str, object]] = field(default_factory=list)
    since: list[float] = field(default_factory=list)
    may_lose: list[int] = field(default_factory=list)

    def suffer(self, plan: list[SupervisorKill]) -> None:
        """Train, and go on after each of the kills."""
        project = self.project
        self.job = project.train(*MANY, nodes=2, options=("--cpus-per-task=8",))  # alone
        family = _await_family(self.cluster, project, self.job, 0)
        for launch, kill in enumerate(plan, 1):
            supervisor = os.pidfd_open(family["supervisor"])
            if kill.phase != "start":
                project.reach(self.job, self._last_step() + 1)
            committed, began = max([0, *project.run.committed()]), time.time()
            _begin(kill.phase, self.cluster, project, self.job)
            time.sleep(kill.after)  # the moment is what is drawn
            ranks_too, killed = kill.phase == "restart", time.monotonic()
            self.since.append(began if ranks_too else time.time())
            hit = _kill(kill, supervisor)
            family = _await_family(self.cluster, project, self.job, launch)
            self.may_lose.append(ranks_too * (self._last_step() - committed))
            took = round(time.monotonic() - killed, 1)
            self.kills.append({**asdict(kill), "hit": hit, "seconds_to_next_launch": took})

    def _last_step(self) -> int:
        return max([0, *_steps(self.project)])

    def made_again(self) -> list[int]:
        """Steps that were made again after each kill, until the next."""
        known, again = set[int](), [0] * len(self.since)
        for row in self.project.run.metrics():
            if row["step"] in known:
                again[sum(moment < row["time"] for moment in self.since) - 1] += 1
            known.add(row["step"])
        return again


@pytest.fixture(scope="module")
def reference(shared: Path, corpus: Path) -> Run:
    """The run whose supervisor is killed, undisturbed."""
    complete = lambda folder: Run(folder, corpus).complete(2, *MANY, deadline=600)  # noqa: E731
    return Run(made_once(shared / "of-killed-supervisors", complete), corpus)


@pytest.mark.drill
@pytest.mark.every_slurm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_supervisor_killed_at_any_moment_costs_no_step(
    cluster: Cluster, project: Project, reference: Run, part: int
) -> None:
    """Each part is runs of its own, and can be done by itself. A kill of ranks may cost what they
    had not saved; their supervisor's never costs a step."""
    folders = [project.folder.with_name(f"project-{number}") for number in range(1, JOBS)]
    projects = [project, *(Project.make(cluster, folder, project.run.data) for folder in folders)]
    jobs = [Killed(cluster, each) for each in projects]
    project.slow(*cluster.options.node_names)
    began = time.monotonic()
    with ThreadPoolExecutor(JOBS) as threads:
        plans = [_plan(JOBS * part + number) for number in range(JOBS)]
        ends = [threads.submit(job.suffer, plan) for job, plan in zip(jobs, plans, strict=True)]
    took = time.monotonic() - began
    project.hurry()
    for number, (job, end) in enumerate(zip(jobs, ends, strict=True)):
        for kill in job.kills:
            note("kill the supervisor", part=part, job=number, **kill)
        end.result()
        _assert_lost_nothing(job, reference)
    again = [job.made_again() for job in jobs]
    note("kill the supervisor, all", part=part, kills=JOBS * KILLS, not_requeued=0,
         steps_made_again=again, promised=[job.may_lose for job in jobs],
         seconds_a_kill=round(took / (JOBS * KILLS), 1))  # fmt: skip


def _assert_lost_nothing(killed: Killed, reference: Run) -> None:
    """Its job came back after every kill, and made every step as the reference did."""
    killed.project.end(killed.job, deadline=600)
    assert killed.cluster.job(killed.job)["Restarts"] == str(KILLS)
    again, may_lose = killed.made_again(), killed.may_lose
    # A launch that was too short to make all of the lost steps leaves some to the next.
    lost = zip(accumulate(again), accumulate(may_lose), strict=True)
    assert all(made <= may for made, may in lost), (again, may_lose)
    assert_like(killed.project.run, reference)
