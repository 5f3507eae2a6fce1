"""`kempner lab`: a cluster that outlives its command, for root and for a user without rights."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import drills, wait_until
from lab import missing
from patience import scaled

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(missing()), reason=missing())]

JOB = """#!/bin/sh
#SBATCH --nodes=2 --requeue --open-mode=append --output=out
srun --ntasks=2 sh -c 'echo "$(hostname) $(id -un) ${SLURM_RESTART_COUNT:-0}"'
srun sleep infinity  # Slurm ends it as it preempts the job
scontrol requeue "$SLURM_JOB_ID"
"""


@dataclass(frozen=True)
class Person:
    """A user who types `kempner lab ...` in a folder."""

    name: str
    folder: Path

    def types(self, *words: str) -> str:
        """What is printed."""
        done = subprocess.run(
            [*self.become(), sys.executable, "-m", "kempner", "lab", *words],
            cwd=self.folder,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder), "SHELL": "/bin/sh"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def become(self) -> Sequence[str]:
        """This user alone, who may read all files, as Python may lie where only root can."""
        if self.name == "root":
            return ()
        user = pwd.getpwnam(self.name)
        ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
        read = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
        return ("setpriv", *ids, *read)

    def processes(self) -> list[str]:
        """All processes that have to do with the lab, on the whole machine."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if b"SLURM_CONF=" + bytes(self.folder) in told and int(entry.name) != os.getpid():
                found.append(told.decode(errors="replace"))
        return found


@pytest.fixture(params=["daemon", *drills("root")])
def person(request: pytest.FixtureRequest) -> Iterator[Person]:
    """Each with a new folder, under a short name and not below one that only root can enter."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    shutil.chown(folder, request.param)
    (folder / "job.sh").write_text(JOB)
    person = Person(request.param, folder)
    check = [*person.become(), sys.executable, "-c", "from kempner.lab import place; place.check()"]
    tried = subprocess.run(check, capture_output=True, text=True, check=False)
    if "may not make namespaces" in tried.stderr:
        pytest.skip(tried.stderr.splitlines()[-1])
    yield person
    shutil.rmtree(folder)


def network_of_the_host() -> list[str]:
    """Its interfaces, and the network namespaces that have names."""
    told = subprocess.run(["ip", "netns"], check=True, text=True, capture_output=True).stdout
    return [*sorted(path.name for path in Path("/sys/class/net").iterdir()), told]


def test_it_comes_has_a_preempted_job_requeued_and_goes_without_a_trace(person: Person) -> None:
    host = network_of_the_host()
    try:
        said = person.types("up", "--nodes=2", "--gpus=1")
        assert f"node2 are up, in {person.folder}/kempner/lab" in said
        assert "node[1-2]         idle" in person.types("status")
        person.types("run", "sbatch", "job.sh")
        out = person.folder / "out"
        begun = {f"node1 {person.name} 0", f"node2 {person.name} 0"}
        wait_until(lambda: out.exists() and begun <= {*out.read_text().split("\n")}, "it runs")
        person.types("fault", "preempt", "1")
        requeued = lambda: "Restarts=1" in person.types("run", "scontrol", "show", "job", "1")  # noqa: E731
        wait_until(requeued, "the job is requeued", interval=0.5)
        person.types("fault", "lose", "node2")
        assert "without power: node2" in person.types("status")
        person.types("fault", "return", "node2")
        person.types("fault", "cut", "node1")
        assert "links that are cut: node1 ib0" in person.types("status")
        assert person.processes()
    finally:
        person.types("down")
    assert not (person.folder / "kempner" / "lab").exists()
    wait_until(lambda: person.processes() == [], "all of its processes are gone")
    assert str(person.folder) not in Path("/proc/self/mountinfo").read_text()
    assert network_of_the_host() == host
    assert not list(Path("/sys/fs/cgroup").glob(f"freezer/*{person.folder.name}*"))
