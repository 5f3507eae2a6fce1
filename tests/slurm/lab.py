"""A real Slurm cluster of eight nodes on one Linux machine, and the faults that it can have.

Needs root and the Debian packages slurm-wlm, slurmdbd, munge, mariadb-server, iproute2 and
nftables. It is up in seconds, gone in one, and takes about 200 MB idle.

In a test, ask for the fixture `cluster` (one cluster per session; after each test its jobs are
ended and its faults mended):

    def test_something(cluster: Cluster, tmp_path: Path) -> None:
        job = cluster.sbatch("--nodes=8", "--output=/shared/%j.out", script)  # a job id
        cluster.wait_for(job, "COMPLETED")
        cluster.job(job)["Restarts"], cluster.sacct(job, "State", "ExitCode", duplicates=True)
        cluster.run("node3", "ip", "-br", "addr").stdout  # any command, on any machine
        cluster.crash("node4"), cluster.cut("node2", "ib0", "cable"), cluster.preempt(job)
        cluster.slow("node2", "ib0", "2mbit")
        cluster.configure(grace=0)  # any field of Options; mended after the test

By hand, `python tests/slurm/lab.py [--slurm VERSION] [COMMAND...]` runs a command, or a shell, on
the login machine of a new cluster, and takes the cluster down when it ends. The Slurm is that of
this machine, or one of `versions.py`.

The machines are `login1` (munge, accounting, controller) and `node1` to `node8` (8 CPUs, 4 GPUs
that are device files only). `em4` (10.20.0.x) is the management network, which host names mean;
`ib0` (10.10.0.x) plays InfiniBand. As on many clusters, ranks reach each other over `ib0` alone:
from node to node `em4` carries what Slurm's daemons say, by their ports, and its switch drops all
else, so that who connects there hears nothing until its time is over. The login machine, which has
no `ib0`, reaches all nodes over `em4`, and they it. Folders are shared, as on a cluster. Partitions
`low` (default, gives way) and `high`. The limits: one kernel and clock, no enforced memory, and an
interface's type is Ethernet's even where it plays InfiniBand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by hand

from harness import wait_until
from nodes import Machine, Switch, address
from patience import slowness
from services import PATH, Services
from slurm_conf import LOGIN, Options, write_configuration
from versions import root_of

TOOLS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")
TOOLS += ("ip", "nft", "nsenter", "setpriv")
SERVICES = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd", "munged", "mariadbd")


def missing() -> str:
    """Why there can be no lab here, in a few words; empty if there can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if lacking:
        return f"a real Slurm needs {', '.join(lacking)}"
    return "" if os.geteuid() == 0 else "a real Slurm needs root"


_RESUME_DRAINED = (
    "sinfo -h -N -p low -t drained -o %N | xargs -r -I{} scontrol update nodename={} state=resume"
)
"""A node on which a process did not die in time is drained by Slurm."""


class Cluster(Services):
    """The machines, their Slurm, and what a person or a mishap can do to them."""

    def __init__(self, folder: Path, options: Options | None = None) -> None:
        self.options = self._wanted = options or Options()
        self.root = root_of(self.options.slurm) if self.options.slurm else None
        super().__init__(folder, [LOGIN, *self.options.node_names], self.root)
        self._switch = Switch(Machine("switch", folder, self.environ))
        self._cut: set[tuple[str, str]] = set()

    # Up and down

    def up(self) -> None:
        """Start everything and wait until all nodes are idle."""
        for name in ("etc", "log", "munge", "state", "spool", "dev", "mnt", "jobs"):
            (self.folder / name).mkdir(parents=True)
        for number in range(self.options.gpus):  # device nodes like /dev/null, named like GPUs
            mode, device = stat.S_IFCHR | 0o666, os.makedev(1, 3)
            os.mknod(self.folder / "dev" / f"nvidia{number}", mode, device)
        write_configuration(self.options, self.folder)
        self._switch.boot()
        for name, machine in self.machines.items():
            machine.boot()
            self._switch.plug(machine, ["em4"] if name == LOGIN else ["em4", "ib0"])
        self.start_munge()
        self.start_database()
        self.start_accounting()
        self._set_qos()
        self.daemon(LOGIN, "slurmctld", "-c")
        self.await_port(LOGIN, LOGIN, 6817)
        for name in self.options.node_names:
            self.daemon(name, "slurmd")
        self.wait_idle()

    def down(self) -> None:
        """End every process; logs stay in the folder."""
        for machine in [*self.machines.values(), self._switch.machine]:
            machine.power_off()
        tidy(self.folder)

    # What a person does

    def sbatch(self, *arguments: str, cwd: Path | None = None, **environ: str) -> str:
        """Submit a job; its id. Outputs go to the working directory, by default `folder`/jobs."""
        told = self.run(LOGIN, "sbatch", "--parsable", *arguments, cwd=cwd, **environ)
        return told.stdout.split()[-1]

    def address(self, machine: str, interface: str) -> str:
        """Its address on `em4` or `ib0`."""
        return address(machine, interface)

    def squeue(self, job: str, columns: str = "%T") -> str:
        """A line of squeue about a job; empty once it has left the queue."""
        told = self.run(LOGIN, "squeue", "-h", "-j", job, "-o", columns, check=False)
        return told.stdout.strip() if told.returncode == 0 else ""

    def scontrol(self, *arguments: str) -> str:
        """The output of a command of scontrol."""
        return self.run(LOGIN, "scontrol", *arguments).stdout

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.scontrol("show", "job", "-o", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def sacct(self, job: str, *columns: str, duplicates: bool = False) -> list[dict[str, str]]:
        """Accounting records of a job and its steps; with `duplicates`, of every run of it."""
        told = self.run(
            LOGIN,
            *("sacct", "-P", "-j", job, f"--format={','.join(columns)}"),
            *(["-D"] if duplicates else []),
        )
        head, *rows = [line.split("|") for line in told.stdout.splitlines()]
        return [dict(zip(head, row, strict=True)) for row in rows]

    def wait_for(self, job: str, *states: str, deadline: float = 90) -> str:
        """Wait until a job is in one of the states, and return it."""

        def reached() -> str:
            state = self.job(job)["JobState"]
            return state if state in states else ""

        what = f"job {job} is {' or '.join(states)}"
        return str(wait_until(reached, what, deadline, interval=0.1))

    def wait_idle(self, deadline: float = 60) -> None:
        """Wait until every node is up and free."""

        def idle() -> bool:
            told = self.run(LOGIN, "sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False)
            return told.stdout.split() == ["idle"] * self.options.nodes

        wait_until(idle, "all nodes are idle", deadline, interval=0.1)

    def preempt(self, job: str, seconds: int = 10) -> str:
        """Submit a job of higher priority that needs exactly the nodes of `job`; its id."""
        hosts = self.squeue(job, "%N")
        rank = "--partition=high" if self.options.preempt == "partition" else "--qos=urgent"
        return self.sbatch(
            *("--exclusive", "--time=10", "--output=/dev/null", f"--nodelist={hosts}", rank),
            *("--job-name=preemptor", f"--wrap=sleep {seconds}"),
        )

    def configure(self, **changes: Any) -> None:
        """Change fields of `Options`; jobs do not notice, unless they are just being launched."""
        before, self.options = self.options, replace(self.options, **changes)
        if self.options == before:
            return
        self._switch.guard(not self.options.open_management)
        write_configuration(self.options, self.folder)
        self._set_qos()
        fixed = lambda options: (options.preempt, options.cpus)  # noqa: E731
        if fixed(self.options) != fixed(before):  # a reconfiguration cannot change these
            self._restart_controller()
        self.scontrol("reconfigure")

    def _restart_controller(self) -> None:
        self.lose_controller()
        self.restore_controller()

    def lose_controller(self) -> None:
        """The controller goes away: nobody's job ends, and no command gets an answer."""
        login = self.machines[LOGIN]
        patience = time.monotonic() + 5 * slowness()

        def gone() -> bool:
            if time.monotonic() > patience:  # its state is saved; it may wait for ever for slurmdbd
                login.signal(signal.SIGKILL, only="slurmctld")
            return "slurmctld" not in login.processes().values()

        login.signal(signal.SIGTERM, only="slurmctld")
        wait_until(gone, "slurmctld has left", interval=0.05)

    def restore_controller(self) -> None:
        """The controller comes back and goes on where it was; harmless if it is there."""
        if "slurmctld" not in self.machines[LOGIN].processes().values():
            self.daemon(LOGIN, "slurmctld")
            self.await_port(LOGIN, LOGIN, 6817)

    def lose_accounting(self) -> None:
        """The accounting database goes away."""
        login = self.machines[LOGIN]
        login.signal(signal.SIGKILL, only="slurmdbd")
        wait_until(lambda: "slurmdbd" not in login.processes().values(), "slurmdbd has left")

    def restore_accounting(self) -> None:
        """The accounting database comes back, and hears of what it missed."""
        if "slurmdbd" not in self.machines[LOGIN].processes().values():
            self.daemon(LOGIN, "slurmdbd")
            self.await_port(LOGIN, LOGIN, 6819)

    def _set_qos(self) -> None:
        grace = f"gracetime={self.options.grace}"
        self.sacctmgr("modify", "qos", "normal", "set", grace, "preemptmode=requeue")

    # What a mishap does

    def crash(self, node: str) -> None:
        """Every process of a node dies and its connections are closed."""
        self.machines[node].power_off()

    def power_off(self, node: str) -> None:
        """A node loses its power: its peers hear nothing at all."""
        for interface in ("em4", "ib0"):
            self.cut(node, interface, "silent")
        self.machines[node].power_off()

    def kill_slurmd(self, node: str) -> None:
        """Slurm loses sight of a node whose processes live on."""
        self.machines[node].signal(signal.SIGKILL, only="slurmd")

    def hang(self, node: str) -> None:
        """Every process of a node stops."""
        self.machines[node].signal(signal.SIGSTOP)

    def cut(self, node: str, interface: str, how: str = "cable") -> None:
        """Break a link by `cable`, `admin` or `silent`; see `Switch.cut`."""
        self._switch.cut(self.machines[node], interface, how)
        self._cut.add((node, interface))

    def slow(self, node: str, interface: str, rate: str) -> None:
        """Let a node send no faster than `rate`, such as "2mbit" (a second), over a link."""
        shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        self.run(node, "tc", "qdisc", "replace", "dev", interface, "root", *shape)
        self._cut.add((node, interface))

    def heal(self, node: str, interface: str) -> None:
        """Mend a link that is broken or slow."""
        self._switch.heal(self.machines[node], interface)
        self.run(node, "tc", "qdisc", "del", "dev", interface, "root", check=False)
        self._cut.discard((node, interface))

    def boot(self, node: str) -> None:
        """Bring a node back, whatever was done to it."""
        machine = self.machines[node]
        if not machine.up:
            machine.boot()
            self._switch.plug(machine, ["em4", "ib0"])
            self._cut -= {(node, "em4"), (node, "ib0")}
            shutil.rmtree(self.folder / "spool" / node, ignore_errors=True)
        machine.signal(signal.SIGCONT)
        if "slurmd" not in machine.processes().values():
            # Once the controller hears of the reboot, it ends what it takes to run there.
            before = self._slurmd_started(node)
            self.daemon(node, "slurmd", "-b")
            heard = lambda: self._slurmd_started(node) != before  # noqa: E731
            wait_until(heard, f"the controller hears from {node}", 60, interval=0.1)

    def _slurmd_started(self, node: str) -> str:
        words = self.scontrol("show", "node", "-o", node).split()
        return next(word for word in words if word.startswith("SlurmdStartTime="))

    def restore(self) -> None:
        """End every job and mend every fault."""
        self.restore_accounting()
        self.restore_controller()
        for node, interface in sorted(self._cut):
            if self.machines[node].up:  # or it boots with whole links
                self.heal(node, interface)
        for node in self.options.node_names:
            self.boot(node)
        if self.options != self._wanted:
            self.configure(**vars(self._wanted))
        self.run(LOGIN, "scancel", "--user=root", check=False)
        for machine in self.machines.values():  # or it would take KillWait
            machine.signal(signal.SIGKILL, spare=SERVICES)
        self.run(LOGIN, "sh", "-c", _RESUME_DRAINED)
        self.wait_idle()


def tidy(folder: Path) -> None:
    """Remove what a cluster that is down left: its control groups and its data base."""
    for group in Path("/sys/fs/cgroup/freezer").glob(f"{folder.name}-*"):
        for path, _, _ in os.walk(group, topdown=False):
            wait_until(lambda path=path: _remove_group(path), f"{path} is empty", 5)
    shutil.rmtree(folder / "db", ignore_errors=True)


def _remove_group(path: str) -> bool:
    try:
        Path(path).rmdir()
    except OSError:  # its last process is still being reaped
        return False
    return True


def main(words: Sequence[str]) -> int:
    """A cluster for the length of one command on its login machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slurm", default="", help="one of the versions of versions.py")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="lab-")), Options(slurm=asked.slurm))
    try:
        cluster.up()
        inside = cluster.machines[LOGIN].inside(asked.command or ["bash"], Path.cwd())
        return subprocess.run(inside, env={**os.environ, **cluster.environ}).returncode
    finally:
        cluster.down()
        shutil.rmtree(cluster.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
