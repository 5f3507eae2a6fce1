"""A program that dies on another node than the supervisor's: its cause is named all the same, and
what each rank has printed is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from deaths import CHEAP, SECRET, kept_of, last_reason, options, untold, write_deaths
from harness import PYTHON
from submitting import Project

from kempner.insight.report.summary import read_run
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(400)

KINDS = ("exception", "import", "cause", "group", "system_exit", "exit", "memory", "segfault",
         "killed", "complaint", "no_command")  # fmt: skip
DEATHS = [death for death in CHEAP if death.kind in KINDS]
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --no-requeue --output=logs/%j_dies.out
exec {PYTHON} -m kempner supervise --launcher srun {shlex.join(options(DEATHS, "dies"))} \\
    -- bash die.sh
"""


def test_a_death_on_another_node_is_named_wherever_one_looks(
    project: Project, tmp_path: Path
) -> None:
    deaths = write_deaths(project.folder, DEATHS)
    (project.folder / "dies.sh").write_text(SCRIPT)
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
