"""`kempner doctor --allocation` on a real Slurm: all nodes are asked, the one at fault is named."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import PYTHON
from lab import Cluster
from submitting import Project

pytestmark = pytest.mark.timeout(600)

SCRIPT = """#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
sleep infinity
"""

TORCH = """
__version__ = "{version}"
class version:
    cuda, hip = None, None
class cuda:
    is_available = staticmethod(lambda: {gpus} > 0)
    device_count = staticmethod(lambda: {gpus})
"""

SMI = """#!/bin/sh
broken=No
test "$(hostname)" = node2 && broken=Yes
for gpu in 0 1; do
    gpus="$gpus<gpu><product_name>H100</product_name>
    <fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage><remapped_rows>
    <remapped_row_failure>$broken</remapped_row_failure></remapped_rows></gpu>"
done
echo "<nvidia_smi_log><driver_version>550.54.15</driver_version>$gpus</nvidia_smi_log>"
"""


def fake_torch(project: Project, gpus: int) -> Path:
    """A folder with next to nothing in the place of torch: that costs three real imports less."""
    site = project.folder / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text(TORCH.format(version="2.13.0", gpus=gpus))
    return site


class Doctor:
    """The command on the first node of a job, as its batch script would run it."""

    def __init__(self, project: Project) -> None:
        self.project, self.cluster = project, project.cluster
        (project.folder / "job.sh").write_text(SCRIPT)
        self.site = fake_torch(project, gpus=0)
        self.job = self.cluster.sbatch("--output=/dev/null", "job.sh", cwd=project.folder)
        self.cluster.wait_for(self.job, "RUNNING")

    def ask(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        """The exit code, and the findings."""
        config = str(self.project.run.config.relative_to(self.project.folder))
        done = self.cluster.run(
            "node1",
            *(sys.executable, "-m", "kempner", "doctor", config, "--json"),
            *("--allocation", "--jobid", self.job, *arguments),
            check=False,
            cwd=self.project.folder,
            timeout=300,
            PYTHONPATH=f"{self.site}:{Path(__file__).parents[3]}",
        )
        told = done.stdout[done.stdout.index("{") :]
        return done.returncode, json.loads(told)["findings"]

    def bad(self, *arguments: str) -> list[tuple[str, str, list[str]]]:
        """Check, level and nodes of all that is not well."""
        code, findings = self.ask(*arguments)
        found = [(f["check"], f["level"], f["nodes"]) for f in findings]
        found = [each for each in found if each[1] in ("warn", "fail")]
        assert code == (2 if any(level == "fail" for _, level, _ in found) else 0)
        return found


def test_all_nodes_are_asked_and_the_one_at_fault_is_named(
    project: Project, cluster: Cluster
) -> None:
    doctor = Doctor(project)
    code, findings = doctor.ask()
    assert [f for f in findings if f["level"] in ("warn", "fail")] == []
    assert code == 0
    said = {f["check"]: f["sentence"] for f in findings}
    assert said["nodes"] == "3 nodes answered"
    assert said["mesh"].startswith(f"3 ranks on 3 nodes (job {doctor.job}): ")
    assert said["shared folders"] == "what a node writes is seen by the others"
    assert "measured on 3 nodes at once" in said["save time"]
    assert said["interface"] == "ib0 is up and has an address"
    assert said["warning"].startswith("a warning of 120 s")
    assert said["preemption"].startswith("a preemption in partition low leaves 50 s")
    assert said["requeue"] == "the job may be requeued"
    assert said["Slurm"] == "the controller and the accounting answer"

    runs = project.run.folder / "runs"
    runs.mkdir(exist_ok=True)
    with ExitStack() as mended:

        def hide(node: str, folder: Path, *copied: str) -> None:
            cluster.run(node, "mount", "-t", "tmpfs", "tmpfs", str(folder))
            mended.callback(cluster.run, node, "umount", str(folder))

        hide("node2", runs)
        hide("node3", doctor.site)  # so that the real torch is found there, of another version
        cluster.run("node3", "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/dev/shm")
        mended.callback(cluster.run, "node3", "umount", "/dev/shm")
        assert doctor.bad() == [
            ("shared folders", "fail", ["node2"]),
            ("software", "fail", ["node3"]),
            ("/dev/shm", "fail", ["node3"]),
        ]

    cluster.cut("node3", "ib0", "silent")
    cluster.kill_slurmd("node2")
    assert doctor.bad() == [("nodes", "fail", ["node2"]), ("interface", "fail", ["node3"])]


def test_a_batch_script_begins_with_it_and_the_gpus_of_all_nodes_are_looked_at(
    project: Project, cluster: Cluster
) -> None:
    site = fake_torch(project, gpus=2)
    (site / "nvidia-smi").write_text(SMI)
    (site / "nvidia-smi").chmod(0o755)
    config = project.run.config.relative_to(project.folder)
    doctor = f"{PYTHON} -m kempner doctor {config} --allocation --json > told.json"
    job = cluster.sbatch(
        *("--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2", "--output=log"),
        f"--wrap={doctor}; echo $? > code",
        cwd=project.folder,
        PYTHONPATH=f"{site}:{Path(__file__).parents[3]}",
        PATH=f"{site}:{cluster.environ['PATH']}",
    )
    cluster.wait_for(job, "COMPLETED")
    told = json.loads((project.folder / "told.json").read_text())
    bad = [f for f in told["findings"] if f["level"] in ("warn", "fail")]
    assert [(f["check"], f["nodes"]) for f in bad] == [("GPU health", ["node2"]), ("warning", [])]
    assert "GPU 0 cannot replace broken rows" in bad[0]["sentence"]
    assert bad[1]["sentence"].startswith(f"the script of job {job} asks for no warning")
    said = {f["check"]: f["sentence"] for f in told["findings"]}
    assert said["ranks and GPUs"] == "2 ranks per node, 2 GPUs"
    assert (project.folder / "code").read_text() == "2\n"
