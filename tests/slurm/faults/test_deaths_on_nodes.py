"""A program that dies on another node than the supervisor's: its cause is named all the same, and
what each rank has printed is kept."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from deaths import (
    CHEAP,
    HOARDS,
    LIMIT_OF_GROUP,
    SECRET,
    Death,
    kept_of,
    last_reason,
    options,
    untold,
    write_deaths,
)
from harness import PYTHON
from submitting import Project

from kempner.cluster.machine import MemoryGroup
from kempner.insight.report.summary import read_run
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(400)

KINDS = ("exception", "import", "cause", "group", "system_exit", "exit", "memory", "segfault",
         "killed", "complaint", "no_command")  # fmt: skip
DEATHS = [death for death in CHEAP if death.kind in KINDS]
BEYOND_LIMIT = """
for process in $PPID $$; do echo $process > {}/cgroup.procs; done
exec {} -c "{}"
"""
"""What a rank does, within a group for it and its agent."""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --no-requeue --output=logs/%j_dies.out
exec {} -m kempner supervise --launcher srun {} -- bash die.sh
"""


def test_a_death_on_another_node_is_named_wherever_one_looks(
    project: Project, tmp_path: Path, limited: Callable[[int], MemoryGroup]
) -> None:
    hoards = BEYOND_LIMIT.format(limited(LIMIT_OF_GROUP).path, PYTHON, HOARDS)
    last = Death("out_of_memory", "out of memory: the kernel killed it (oom_kill of", shell=hoards)
    deaths = write_deaths(project.folder, [*DEATHS, last])
    command = SCRIPT.format(PYTHON, shlex.join(options(deaths, "dies")))
    (project.folder / "dies.sh").write_text(command)
    run = RunDirectory(project.folder / "runs" / "dies")
    job = project.cluster.sbatch("dies.sh", cwd=project.folder, SECRET_TOKEN=SECRET)
    project.end(job, "FAILED", deadline=300)

    assert untold(run, deaths, tmp_path / "then") == []
    interruptions = read_run(run).report.interruptions
    assert [one.place.node for one in interruptions] == ["node2"] * len(deaths)
    assert deaths[-1].named in last_reason(run)
    assert deaths[-1].named in (project.folder / "hook.txt").read_text()
    assert deaths[-1].named in "".join(project.log(job).splitlines()[-4:])
    for attempt in range(1, len(deaths) + 1):
        assert kept_of(run, attempt, 0) == "rank 0 has ***\n"
        assert kept_of(run, attempt, 1).startswith("rank 1 has ***\n")
