"""A real Slurm cluster of eight nodes on one Linux machine, with faults on demand.

It starts in seconds, stops in one, and uses about 200 MB idle. The machines are `login1` (munge,
accounting, controller) and `node1` to `node8` (8 CPUs, 4 GPUs that are device files only). `em4`
(10.20.0.x) is the management network, to which host names resolve; `ib0` (10.10.0.x) emulates
InfiniBand. As on many clusters, ranks reach each other only over `ib0`: between nodes `em4` passes
only Slurm's ports, and silently drops all else, so that connections time out. The login machine has
no `ib0`, and is connected to all nodes over `em4`. Folders are shared. Partitions are `low`
(default, preempted) and `high`.

Limits: there is one kernel and one clock, memory is not enforced, and all interfaces are of type
Ethernet, even `ib0`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kempner.lab.machines import wait_until
from kempner.lab.services import Services
from kempner.lab.slurm_conf import LOGIN, Options, write_configuration
from kempner.run.process.exit_codes import UsageError

FOLDERS = ("etc", "log", "machines", "munge", "state", "spool", "dev", "mnt", "jobs")
INTERFACES = ("em4", "ib0")


class Cluster(Services):
    """The machines and their Slurm, with users' commands and faults."""

    def __init__(
        self,
        folder: Path,
        options: Options | None = None,
        root: Path | None = None,
        bound: bool = False,
    ) -> None:
        self.options = options or Options()
        super().__init__(folder, [LOGIN, *self.options.node_names], root, bound)

    # Start and stop

    def up(self, tell: Callable[[str], object] = lambda doing: None) -> None:
        """Start everything and wait until all nodes are idle; `tell` is called with each stage."""
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True)
        for number in range(self.options.gpus):
            (self.folder / "dev" / f"nvidia{number}").symlink_to("/dev/null")
        write_configuration(self.options, self.folder)
        tell(f"{LOGIN} and {self.options.nodes} nodes, in two networks")
        self.switch.boot()
        self.switch.guard(not self.options.open_management)
        for name, machine in self.machines.items():
            machine.boot()
            self.switch.plug(machine, ["em4"] if name == LOGIN else INTERFACES)
        tell("munge and a data base")
        self.start_munge()
        self.start_database()
        tell("Slurm's accounting")
        self.start_accounting()
        self.set_qos()
        tell("Slurm's controller, and a slurmd on each node")
        self.daemon(LOGIN, "slurmctld", "-c")
        self.await_port(LOGIN, LOGIN, 6817)
        for name in self.options.node_names:
            self.daemon(name, "slurmd")
        self.wait_idle()

    def down(self) -> None:
        """Kill all processes; files stay in the folder, except the database."""
        self.switch.machine.power_off()  # all others live in it
        _remove_groups(self.folder)
        shutil.rmtree(self.folder / "db", ignore_errors=True)

    # Users' commands

    def sbatch(self, *arguments: str, cwd: Path | None = None, **environ: Any) -> str:
        """Submit a job; its id. Output goes to the working directory, by default `folder`/jobs."""
        done = self.run(LOGIN, "sbatch", "--parsable", *arguments, cwd=cwd, **environ)
        return done.stdout.split()[-1]

    def squeue(self, job: str, columns: str = "%T") -> str:
        """The line of squeue for a job; empty once it has left the queue."""
        done = self.run(LOGIN, "squeue", "-h", "-j", job, "-o", columns, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def scontrol(self, *arguments: str) -> str:
        return self.run(LOGIN, "scontrol", *arguments).stdout

    def job(self, job: str) -> dict[str, str]:
        words = self.scontrol("show", "job", "-o", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_idle(self) -> None:
        def idle() -> bool:
            done = self.run(LOGIN, "sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False)
            return done.stdout.split() == ["idle"] * self.options.nodes

        self.wait_until(idle, "all nodes are idle", 60)

    def preempt(self, job: str, seconds: int = 10) -> str:
        """Submit a job of higher priority for exactly the nodes of `job`; its id."""
        hosts = self.squeue(job, "%N")
        if not hosts:
            raise UsageError(f"job {job} does not run; only a job that has nodes is preempted")
        rank = "--partition=high" if self.options.preempt == "partition" else "--qos=urgent"
        return self.sbatch(
            *("--exclusive", "--time=10", "--output=/dev/null", f"--nodelist={hosts}", rank),
            *("--job-name=preemptor", f"--wrap=sleep {seconds}"),
        )

    def end_in_minutes(self, job: str, minutes: int) -> None:
        """Set a job's time limit to end in `minutes`, rounded up to a full minute of its run
        time."""
        hours, gone, _ = self.job(job)["RunTime"].rpartition("-")[2].split(":")
        limit = 60 * int(hours) + int(gone) + 1 + minutes
        self.scontrol("update", f"jobid={job}", f"TimeLimit={limit}")

    def set_qos(self) -> None:
        """Make jobs of the normal QOS preemptible, with the configured grace time."""
        grace = f"gracetime={self.options.grace}"
        self.sacctmgr("modify", "qos", "normal", "set", grace, "preemptmode=requeue")

    # Faults

    def power_off(self, node: str) -> None:
        for interface in INTERFACES:
            self.cut(node, interface, "silent")
        self.machines[node].power_off()

    def cut(self, node: str, interface: str, how: str = "cable") -> None:
        self.switch.cut(self.machines[node], interface, how)

    def heal(self, node: str, interface: str) -> None:
        self.switch.heal(self.machines[node], interface)

    def boot(self, node: str) -> None:
        """Bring a node back after any fault except cut links."""
        machine = self.machines[node]
        if not machine.up:
            machine.boot()
            self.switch.plug(machine, INTERFACES)
            shutil.rmtree(self.folder / "spool" / node, ignore_errors=True)
        machine.signal(signal.SIGCONT)
        if "slurmd" not in machine.processes().values():
            # When the controller hears of the reboot, it ends the jobs on the node.
            before = self._slurmd_started(node)
            self.daemon(node, "slurmd", "-b")
            heard = lambda: self._slurmd_started(node) != before  # noqa: E731
            self.wait_until(heard, f"the controller hears from {node}", 60)

    def bring_back(self, node: str) -> None:
        """Bring a node back into service after any fault, including cut links."""
        if self.machines[node].up:  # else it boots with intact links
            for interface in INTERFACES:
                self.heal(node, interface)
        self.boot(node)
        # Slurm leaves a node drained or down if a process did not die or it came back too late.
        resume = ("scontrol", "update", f"nodename={node}", "state=resume")
        self.run(LOGIN, *resume, check=False)

    def _slurmd_started(self, node: str) -> str:
        words = self.scontrol("show", "node", "-o", node).split()
        return next(word for word in words if word.startswith("SlurmdStartTime="))


def _remove_groups(folder: Path) -> None:
    for group in Path("/sys/fs/cgroup/freezer").glob(f"{str(folder).replace('/', '-')}-*"):
        for path, _, _ in os.walk(group, topdown=False):
            wait_until(partial(_removed, path), f"{path} is empty", 60)


def _removed(path: str) -> bool:
    try:
        Path(path).rmdir()
    except OSError:  # its last process is still being reaped
        return False
    return True
