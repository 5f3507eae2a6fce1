"""SIGKILL of a rank at moments of every kind, over eight nodes: healed within one job.

Eight ranks start fifty times; `make check` has a kill of each kind on one machine, in
tests/drills/runs/test_kills_and_restarts.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drilling import SEED
from kills import assert_healed, assert_on_demand, note_healing, overrides, plain_start, plan_kills
from lab import Cluster
from submitting import Project

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.drill,
    pytest.mark.alone("starts are measured that need all eight nodes"),
]

NODES, INTERVAL, KILLS = 8, 3, 50


def test_kills_over_eight_nodes_heal_within_the_job(
    project: Project, cluster: Cluster, tmp_path: Path, corpus: Path
) -> None:
    kills = [replace(kill, after=None) for kill in plan_kills(KILLS, NODES, INTERVAL, SEED)]
    options = [*overrides(kills, NODES, INTERVAL), "--train.threads=1", "--train.log_samples=true"]
    undisturbed, again = (Project.make(cluster, tmp_path / n, corpus) for n in ("first", "again"))
    undisturbed.end(undisturbed.train(*options, nodes=NODES), deadline=300)
    faults = "; ".join(kill.fault for kill in kills)
    job = project.train(*options, nodes=NODES, options=("--time=180",), KEMPNER_FAULTS=faults)
    project.end(job, deadline=6600)
    project.assert_states(job, "COMPLETED")
    assert_on_demand(project.run, kills, project.log(job))
    assert_healed(project.run, undisturbed.run, kills)
    again.end(again.train(*options, nodes=NODES), deadline=300)  # the machine may be slower by now
    plain = [plain_start(one.run) for one in (undisturbed, again)]
    note_healing("kill on the cluster", project.run, kills, plain)
