"""Programs of any kind behind wrappers of any kind: stopped, requeued, killed, and nothing left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import PYTHON
from lab import SERVICES
from stand_ins import APPTAINER
from submitting import Project

from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(400)

PROGRAMS = Path(__file__).parent / "programs"

BASH = """#!/bin/bash
# No shell forwards a signal; it dies of one, and leaves the program.
set -e  # or it would end with 0 whatever becomes of the program
echo "from a script"
"$@"
echo "the program has ended"
"""

CONDA_RUN = """#!/bin/bash
# As `conda run -n ENV`: a process that stays, and passes on a signal by itself.
[ "$1 $2 $3" = "run -n env" ] || exit 99
shift 3
"$@" &
trap 'kill -TERM $!' TERM
wait $!
wait $!
"""

ACCELERATE = f"""#!/bin/bash
# As docs/accelerate.md has it: one launcher per node, which starts the ranks of its node.
exec {PYTHON} -m accelerate.commands.launch --multi_gpu \\
    --mixed_precision no --dynamo_backend no --num_machines "$WORLD_SIZE" --machine_rank "$RANK" \\
    --num_processes "$((2 * WORLD_SIZE))" \\
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$@"
"""

SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --requeue --open-mode=append --output=logs/%j_wrapped.out
exec {PYTHON} -m kempner supervise --launcher srun --run.name="$1" -- "${{@:2}}"
"""


@dataclass
class Wrapped:
    """A job on two nodes of its own whose ranks are behind a wrapper."""

    project: Project
    name: str
    nodes: tuple[str, str]
    ranks: int
    job: str = ""
    before: frozenset[int] = frozenset()
    """What runs on its nodes before it."""

    @property
    def folder(self) -> Path:
        """Where the ranks keep their counts."""
        return self.project.folder / self.name

    def submit(self, *command: str) -> None:
        self.folder.mkdir()
        self.before = frozenset(self.processes())
        self.job = self.project.cluster.sbatch(
            f"--nodelist={','.join(self.nodes)}",
            *("wrapped.sh", self.name, *command),
            cwd=self.project.folder,
            OMP_NUM_THREADS="1",
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        ledger = RunDirectory(self.project.folder / "runs" / self.name).ledger
        return [event for event in read_lines(ledger) if event["event"] == name]

    def told(self) -> list[list[str]]:
        """What each rank says: the words of its lines, such as `from` and `stopped`, in order."""
        files = [self.folder / f"told-{rank}" for rank in range(self.ranks)]
        return [re.findall(r"^\w+", f.read_text(), re.M) if f.exists() else [] for f in files]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        self.project.wait_until(self.job, condition, f"{self.name}: {what}", 60)

    def wait_for_event(self, name: str) -> None:
        self.wait_for(lambda: bool(self.events(name)), name)

    def wait_until_started(self, times: int) -> None:
        """Wait until every rank was started so often, and runs."""
        runs = lambda words: words.count("from") == times and words[-1] == "from"  # noqa: E731
        self.wait_for(lambda: all(map(runs, self.told())), f"start {times}")

    def wait_until_gone(self, processes: set[int]) -> None:
        """Wait until none of these is left."""
        self.wait_for(lambda: not processes & set(self.processes()), "nothing is left")

    def wait_until_told(self, *words: str) -> None:
        """Wait until every rank has said exactly these."""
        self.wait_for(lambda: self.told() == [list(words)] * self.ranks, " ".join(words))

    def processes(self, name: str = "") -> list[int]:
        """On its nodes, of all that is not Slurm's and was not there before, or of this name."""
        return [
            pid
            for node in self.nodes
            for pid, found in self.project.cluster.machines[node].processes().items()
            if found not in SERVICES and name in ("", found) and pid not in self.before
        ]

    def wait_for_strays(self) -> None:
        """Wait until there is one daemon for each rank, and no other."""
        self.wait_for(lambda: len(self.processes("stray")) == self.ranks, "a daemon for each rank")

    def counts(self) -> list[list[int]]:
        files = (self.folder / f"told-{rank}" for rank in range(self.ranks))
        return [[int(line.split()[1]) for line in f.read_text().splitlines()] for f in files]


@pytest.fixture
def wrapped(project: Project) -> list[Wrapped]:
    """The four, all at once: each has two of the eight nodes."""
    counter, folder = project.folder / "counter", project.folder
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-O1", "-o", counter, PROGRAMS / "counter.c"], check=True)
    shutil.copy(PROGRAMS / "accelerated.py", folder)
    wrappers = {"bash": BASH, "conda": CONDA_RUN, "apptainer": APPTAINER, "accelerate": ACCELERATE}
    for name, text in wrappers.items():
        (folder / f"{name}-like").write_text(text)
        (folder / f"{name}-like").chmod(0o755)
    (folder / "wrapped.sh").write_text(SCRIPT)
    arguments = {
        "bash": ("bash", "bash-like"),
        "conda": ("./conda-like", "run", "-n", "env"),
        "apptainer": ("./apptainer-like", "exec", "image.sif"),
        "accelerate": ("./accelerate-like", "accelerated.py"),
    }
    found = []
    for first, (name, command) in zip((1, 3, 5, 7), arguments.items(), strict=True):
        nodes = (f"node{first}", f"node{first + 1}")
        of_python = name == "accelerate"
        found.append(Wrapped(project, name, nodes, 4 if of_python else 2))
        last = ("accelerate", "./counter") if of_python else ("./counter", name)
        found[-1].submit(*command, *last)
    return found


def test_what_is_in_a_wrapper_is_stopped_requeued_and_restarted_and_leaves_nothing(
    project: Project, wrapped: list[Wrapped]
) -> None:
    first: dict[str, set[int]] = {}
    for one in wrapped:
        one.wait_until_told("from")
        one.wait_for_strays()
        first[one.name] = set(one.processes())
    for one in wrapped:
        project.warn(one.job)
    for one in wrapped:
        one.wait_for_event("requeued")
        assert all(words[:2] == ["from", "stopped"] for words in one.told())
        one.wait_until_gone(first[one.name])
    for one in wrapped:
        one.wait_until_told("from", "stopped", "from")
        one.wait_for_strays()  # until then they have the program's name
        os.kill(max(one.processes("counter")), signal.SIGKILL)
    for one in wrapped:
        one.wait_for_event("restarting")
        one.wait_until_started(3)
        one.wait_for_strays()  # those of the rank that was killed, and of its peers, are gone
        (one.folder / "finish").touch()
    for one in wrapped:
        project.end(one.job)
        for words, counts in zip(one.told(), one.counts(), strict=True):
            assert words[-1] == "done"
            assert counts[1] == counts[2] > 0  # resumed where it stopped
            assert counts == sorted(counts)
        one.wait_until_gone(set(one.processes()))
        assert not one.processes()
        project.assert_states(one.job, "REQUEUED", "COMPLETED")
