"""`kempner init` on a login machine: the project's first job runs with what Slurm was asked."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from harness import ROOT, TINY, wait_until
from lab import Cluster

from kempner.insight.run_reader import RunFacts
from kempner.insight.status.summary import summarise
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(600)


def test_the_first_job_of_a_new_project(cluster: Cluster, tmp_path: Path, corpus: Path) -> None:
    """Two nodes with all their GPUs, submitted as docs/slurm.md says."""
    kempner = (sys.executable, "-m", "kempner")
    said = cluster.run("login1", *kempner, "init", "p", cwd=tmp_path).stdout
    assert "low (default): 8 nodes of 4 GPUs and 8 CPUs, account root; 1 other partition" in said
    project = tmp_path / "p"
    shutil.copytree(corpus, project / "data" / "train")
    (project / "train.toml").write_text(TINY.format(dir="runs", data="data/train"))

    assert said.splitlines()[-1] == "  sbatch --nodes=2 scripts/slurm/multinode.sh train.toml"
    page = (ROOT / "docs" / "slurm.md").read_text()
    (line,) = re.findall(r"^\$ sbatch (.*)$", page, re.MULTILINE)
    job = cluster.sbatch(*shlex.split(line), cwd=project, OMP_NUM_THREADS="1")
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", deadline=400)
    (log,) = (project / "logs").glob(f"{job}_*.out")
    assert ended == "COMPLETED", log.read_text()
    fields = cluster.job(job)
    assert (fields["Partition"], fields["Account"]) == ("low", "root")
    assert "2 nodes (node1,node2), 8 ranks, 4 per node" in log.read_text()
    run = RunDirectory(project / "runs" / "first")
    history = wait_until(lambda: RunHistory.read(run.ledger), "the ledger")
    assert summarise(RunFacts(0.0, history)).state == "completed"
