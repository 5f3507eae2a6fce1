"""Other people's jobs on the cluster: some hold nodes, and others wait for any that comes free."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from harness import wait_until
from lab import Cluster

HELD = 4
"""Nodes, the last ones, that are busy with another job all the time."""

_WELL = {"COMPLETED", "CANCELLED"}
_FAILED = {"FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"}

SCRIPT = """#!/bin/bash
# A short job of one node, which it must be able to start a step on.
srun --overlap true && sleep 1
"""


AT_ONCE = 2
"""How many of those that come with a job run at the same time: the tests' machine is small."""


class Neighbours:
    """Jobs of a node each, some of which wait from `arrive` until they `leave`: a node that is
    given up meanwhile is taken at once. Those that `come_with` a job are fewer, and hold none."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._jobs: list[str] = []
        self._holder = ""

    def arrive(self) -> None:
        """Hold the last nodes, and queue for the others."""
        whole = ("--exclusive", "--output=/dev/null", "--no-requeue")
        last = self._cluster.options.node_names[-HELD:]
        holder = self._script("holder.sh", "#!/bin/bash\nsleep 3600\n")
        on_last = (f"--nodes={HELD}", f"--nodelist={','.join(last)}")
        self._holder = self._cluster.sbatch(*whole, *on_last, holder)
        self._cluster.wait_for(self._holder, "RUNNING")
        script = self._script("neighbour.sh", SCRIPT)
        self._jobs.append(self._cluster.sbatch(*whole, "--nodes=1", "--array=1-300", script))
        wait_until(lambda: self.states()["COMPLETED"], "a neighbour's job is done", 60)

    def come_with(self, job: str) -> None:
        """As soon as a job runs, for the first one: one after the other, on the first free nodes,
        which a node that is given up is among."""
        if self._jobs:
            return
        whole = ("--exclusive", "--output=/dev/null", "--no-requeue", "--nodes=1")
        when = (f"--dependency=after:{job}", f"--array=1-300%{AT_ONCE}")
        script = self._script("neighbour.sh", SCRIPT)
        self._jobs.append(self._cluster.sbatch(*whole, *when, script))

    def go(self) -> None:
        """End those that came with a job; none of them may have failed."""
        if not self._jobs:
            return
        self._cluster.run("login1", "scancel", "--state=PENDING", *self._jobs, check=False)
        over = lambda: set(self.states()) <= {*_WELL, *_FAILED}  # noqa: E731
        wait_until(over, "the neighbours' jobs are over", 60)
        found = self.states()
        assert set(found) <= _WELL, found
        self._jobs.clear()

    def states(self) -> Counter[str]:
        """In which states their jobs are, by Slurm's accounting."""
        rows = [row for job in self._jobs for row in self._cluster.sacct(job, "JobID", "State")]
        return Counter(row["State"].split()[0] for row in rows if "." not in row["JobID"])

    def leave(self) -> None:
        """Withdraw those that wait, once two more have had their turn; all that have run must have
        been well."""
        if not self._jobs:
            return
        enough = self.states()["COMPLETED"] + 2

        def had_their_turn() -> bool:
            states = self.states()
            return states["COMPLETED"] >= enough or not states["PENDING"]

        wait_until(had_their_turn, "two neighbours' jobs are done", 60)
        self._cluster.run("login1", "scancel", "--state=PENDING", *self._jobs, check=False)
        running = lambda: self.states()["RUNNING"] == 0  # noqa: E731
        wait_until(running, "the neighbours' jobs are over", 60)
        found = self.states()
        assert set(found) <= _WELL, found
        self._cluster.run("login1", "scancel", self._holder)
        self._jobs.clear()

    def _script(self, name: str, text: str) -> str:
        path = self._folder / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)
