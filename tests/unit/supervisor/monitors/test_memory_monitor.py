"""What ranks use is measured, and trouble with it is named with its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from harness import wait_until

from kempner.cluster.machine import KILLED_WITHIN, MemoryGroup, OutOfMemoryKills, memory_group
from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Connected, NodeMemory, Phase, Usage
from kempner.run.record.events import MemoryLow, ResourceGrowth
from kempner.run.record.ledger import Ledger, read_lines
from kempner.supervisor.monitors.advisers import (
    GROWTH_SPAN,
    SPANS,
    GrowthTracker,
    MemoryMonitor,
    explain_kill,
    explained,
)
from kempner.supervisor.monitors.base import (
    DurationStats,
    PhasesLearned,
    Reporter,
    ResourceTrouble,
    Snapshot,
)
from kempner.supervisor.policy.outcome import RankExit
from kempner.training.rank_link.rank_link import measure

GIB = 1 << 30
CALM = Usage(
    rss=4 * GIB,
    children=2,
    children_rss=GIB,
    files=80,
    files_limit=1024,
    memory=NodeMemory(50 * GIB, 100 * GIB, "/sys/fs/cgroup/job_7"),
)
JOINED = {rank: Connected(rank, host, 1) for rank, host in enumerate("aab")}


def using(usage: dict[int, Usage], now: float) -> Snapshot:
    return Snapshot(now, 3, usage=usage, joined=JOINED)


def test_a_process_measures_itself_its_children_and_its_node() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        before = measure()
        with open(os.devnull), open(os.devnull):
            assert measure().files == before.files + 2
    finally:
        child.communicate(b"\n")
    assert before.rss > 1 << 20
    assert before.children >= 1
    assert before.children_rss > 0
    assert 0 < before.memory.available <= before.memory.total <= psutil.virtual_memory().total
    assert 0 < before.files < before.files_limit
    assert measure().children == before.children - 1


def test_a_node_that_runs_short_is_named_once_with_its_largest_rank() -> None:
    watch = MemoryMonitor(ResilienceSection(memory_reserve=0.05))
    short = replace(CALM, memory=replace(CALM.memory, available=4 * GIB))
    calm = {0: CALM, 1: CALM, 2: CALM}
    assert watch.check(using(calm, 0.0)) == []
    (told,) = watch.check(using({0: short, 1: replace(short, rss=9 * GIB), 2: CALM}, 10.0))
    assert told.of is MemoryLow
    assert told.rank == 1
    assert told.reason == (
        "it had 9.0 GiB and its 2 processes 1.0 GiB, 80 files were open, and 4.0 GiB of 100.0 GiB "
        "were left"
    )
    assert watch.check(using({0: short, 1: short, 2: CALM}, 20.0)) == []
    assert watch.check(using(calm, 30.0)) == []
    assert [t.rank for t in watch.check(using({0: CALM, 1: CALM, 2: short}, 40.0))] == [2]


def grow(watch: GrowthTracker, values: list[float], room: float) -> list[float]:
    """What is said of one value per span."""
    told = [watch.full_in(v, room, at * GROWTH_SPAN) for at, v in enumerate(values)]
    return [seconds for seconds in told if seconds is not None]


def test_steady_growth_is_told_from_use_that_comes_and_goes() -> None:
    steady = [100.0 + 10 * n for n in range(SPANS + 1)]
    assert grow(GrowthTracker(), steady, room=1000.0) == [1000.0 / 10 * GROWTH_SPAN]
    assert grow(GrowthTracker(), [100.0] * 20, room=1000.0) == []
    assert grow(GrowthTracker(), [100.0, 300.0] * 10, room=1000.0) == []
    assert grow(GrowthTracker(), [*steady[:4], 120.0, *steady[4:]], room=1000.0) == []
    peaks = GrowthTracker()  # within a span the least counts
    for at in range(10 * SPANS):
        assert peaks.full_in(100.0 + (at % 5) * 50 + at * 1e-9 * (at % 2), 1e9, at * 60.0) is None


@pytest.mark.parametrize("what", ["memory", "open files"])
def test_a_rank_that_leaks_is_named_once(what: str) -> None:
    watch, told = MemoryMonitor(ResilienceSection()), []
    for span in range(3 * SPANS):
        leak = {"rss": CALM.rss + span * GIB} if what == "memory" else {"files": 80 + 20 * span}
        told += watch.check(using({0: CALM, 1: replace(CALM, **leak)}, span * GROWTH_SPAN))
    (trouble,) = told
    assert trouble.of is ResourceGrowth
    assert trouble.rank == 1
    assert trouble.reason.startswith(f"{what} grew for 30 minutes")


def test_a_slow_leak_that_a_day_can_bear_is_not_worth_a_word() -> None:
    watch = MemoryMonitor(ResilienceSection())
    for span in range(3 * SPANS):
        assert (
            watch.check(using({0: replace(CALM, rss=CALM.rss + span * 4096)}, span * GROWTH_SPAN))
            == []
        )


def test_what_is_found_is_in_the_ledger_with_its_node(tmp_path: Path) -> None:
    reporter = Reporter(4, Ledger(tmp_path / "ledger.jsonl"), straggler_is_suspect=False)
    snapshot = using({}, 0.0)
    reporter.report(ResourceTrouble(MemoryLow, 2, "little is left"), snapshot)
    reporter.report(ResourceTrouble(ResourceGrowth, 7, "memory grew"), snapshot)
    reporter.report(PhasesLearned({Phase.STEP: DurationStats(1.0, 0.5, 9)}), snapshot)
    low, growth, learned = read_lines(tmp_path / "ledger.jsonl")
    assert (low["event"], low["attempt"], low["rank"], low["node"], low["reason"]) == (
        *("memory_low", 4, 2, "b"),
        "little is left",
    )
    assert (growth["event"], growth["rank"], growth["node"]) == ("growth", 7, None)
    assert (learned["event"], learned["ranks"]) == ("phase_durations", 3)
    assert learned["phases"] == {"step": {"median": 1.0, "spread": 0.5, "count": 9}}


def test_an_out_of_memory_kill_is_explained() -> None:
    assert explain_kill(CALM, 0) == ""
    sentence = explain_kill(CALM, 1)
    assert sentence.startswith("out of memory: the kernel killed it (oom_kill of /sys/fs/cgroup")
    assert "4.0 GiB" in sentence
    after_one = replace(CALM, memory=replace(CALM.memory, oom_kills=1))
    assert explain_kill(after_one, 1) == ""  # that kill was of another process
    assert explain_kill(after_one, 2)


@pytest.mark.parametrize(
    ("end", "seen_by_others", "explained_so"),
    [
        (RankExit(2, -9), 1, True),
        (RankExit(2, None), 1, True),
        (RankExit(2, -9), 0, False),  # another process killed it
        (RankExit(2, -9, oom_kills=1), 0, True),  # its node's agent has seen it
        (RankExit(2, -9, ended_by_us=True), 1, False),
        (RankExit(2, 1, sentence="KeyError"), 1, False),
        (RankExit(4, -9), 1, False),  # it never said where it is
    ],
)
def test_who_fell_to_the_kernel(end: RankExit, seen_by_others: int, explained_so: bool) -> None:
    joined = {r: Connected(r, "a" if r < 2 else "b", 1) for r in range(4)}
    after = replace(CALM, memory=replace(CALM.memory, oom_kills=seen_by_others))
    usage = dict.fromkeys(range(3), CALM) | {3: after}
    assert explained(end, usage, joined).sentence.startswith("out of memory") == explained_so


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize("name", ["job_7", "s4ETMVWNQ8YR00"])
def test_groups_of_version_2(tmp_path: Path, name: str) -> None:
    job = tmp_path / "system.slice" / "slurmstepd.scope" / name
    events = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n"
    write(job, memory__events=events, memory__max="1048576\n", memory__stat="anon 4096\nfile 9\n")
    write(job / "step_0" / "user" / "task_0", memory__events=events, memory__max="max\n")
    line = f"0::/system.slice/slurmstepd.scope/{name}/step_0/user/task_0\n"
    (tmp_path / "mine").write_text(line)
    group = memory_group(tmp_path / "mine", tmp_path)
    assert group == MemoryGroup(job)
    assert (group.oom_kills(), group.limit(), group.used()) == (1, 1 << 20, 4096)
    assert MemoryGroup(job / "step_0" / "user" / "task_0").limit() is None


def test_groups_of_version_1(tmp_path: Path) -> None:
    job = tmp_path / "memory" / "slurm" / "uid_0" / "job_7"
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    unlimited = "9223372036854771712\n"
    write(job, memory__oom_control=control.format(0), memory__limit_in_bytes=unlimited)
    for step, kills in (("step_0", 2), ("step_1", 1)):
        write(job / step / "task_0", memory__oom_control=control.format(kills))
    write(job, memory__stat="rss 1\ntotal_rss 8192\n")
    lines = "9:cpu:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n"
    (tmp_path / "mine").write_text(lines)
    group = memory_group(tmp_path / "mine", tmp_path)
    assert group == MemoryGroup(job)
    assert (group.oom_kills(), group.limit(), group.used()) == (3, None, 8192)


def test_a_container_sees_its_group_where_it_is_mounted(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__oom_control="oom_kill 4\n")
    (tmp_path / "mine").write_text("4:memory:/docker/0123\n")
    group = memory_group(tmp_path / "mine", tmp_path)
    assert group is not None
    assert group.oom_kills() == 4
    (tmp_path / "mine").write_text("0::/elsewhere\n")
    assert memory_group(tmp_path / "mine", tmp_path / "nothing") is None


def test_a_real_out_of_memory_kill_is_counted(limited: Callable[[int], MemoryGroup]) -> None:
    group = limited(64 << 20)
    assert (group.limit(), group.oom_kills()) == (64 << 20, 0)
    hungry = "input(); hoard = [bytearray(1 << 24) for _ in range(64)]"
    child = subprocess.Popen([sys.executable, "-c", hungry], stdin=subprocess.PIPE)
    (group.path / "cgroup.procs").write_text(str(child.pid))
    child.communicate(b"\n")
    assert child.returncode == -9
    wait_until(lambda: group.oom_kills() == 1, "the kill is counted")


@pytest.mark.parametrize("every", [0.5, 5.0, 100.0])
def test_an_out_of_memory_kill_explains_the_ends_of_the_next_seconds_alone(every: float) -> None:
    killed_at, before = 200.0, 3  # of them in an earlier attempt
    kills = OutOfMemoryKills(before, 0.0)
    for turn in range(round(1000 / every)):
        now = turn * every
        count = before + (now >= killed_at)
        kills.note(count, now)
        if now >= killed_at + KILLED_WITHIN + every:
            assert not kills.recent(count)
        elif killed_at <= now < killed_at + KILLED_WITHIN:
            assert kills.recent(count)
        assert kills.recent(count + 1)
