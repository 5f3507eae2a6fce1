"""The cluster of `kempner lab`, with what only tests do to it.

Needs root and the Debian packages slurm-wlm, slurmdbd, munge, mariadb-server, iproute2 and
nftables. In a test, ask for the fixture `cluster` (one cluster per session; after each test its
jobs are ended and its faults mended):

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
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
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
from patience import scaled, slowness
from versions import root_of

from kempner.lab import cluster, place
from kempner.lab.machines import address
from kempner.lab.slurm_conf import LOGIN, Options, write_configuration

SERVICES = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd", "munged", "mariadbd")


def missing() -> str:
    """Why there can be no lab here, in a few words; empty if there can."""
    if lacking := place.lacking_tools():
        return f"a real Slurm needs {', '.join(lacking)}"
    return "" if os.geteuid() == 0 else "a real Slurm needs root"


_RESUME_DRAINED = (
    "sinfo -h -N -p low -t drained -o %N | xargs -r -I{} scontrol update nodename={} state=resume"
)
"""A node on which a process did not die in time is drained by Slurm."""


class Cluster(cluster.Cluster):
    """One that ends with this process, of any `version`, with every fault."""

    def __init__(self, folder: Path, options: Options | None = None, version: str = "") -> None:
        self.version = version
        self.root = root_of(version) if version else None
        self.patience = scaled(1.0)
        super().__init__(folder, options, self.root, bound=True)
        self._wanted = self.options
        self._cut: set[tuple[str, str]] = set()

    # What a person does

    def address(self, machine: str, interface: str) -> str:
        """Its address on `em4` or `ib0`."""
        return address(machine, interface)

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

    def configure(self, **changes: Any) -> None:
        """Change fields of `Options`; jobs do not notice, unless they are just being launched."""
        before, self.options = self.options, replace(self.options, **changes)
        if self.options == before:
            return
        self.switch.guard(not self.options.open_management)
        write_configuration(self.options, self.folder)
        self.set_qos()
        fixed = lambda options: (options.preempt, options.cpus)  # noqa: E731
        if fixed(self.options) != fixed(before):  # a reconfiguration cannot change these
            self._restart_controller()
        self.scontrol("reconfigure")

    def _restart_controller(self) -> None:
        self.lose_controller()
        self.restore_controller()

    def lose_controller(self) -> None:
        """The controller goes away: no job ends, and no command gets an answer."""
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

    # What a mishap does

    def crash(self, node: str) -> None:
        """Every process of a node dies and its connections are closed."""
        self.machines[node].power_off()

    def kill_slurmd(self, node: str) -> None:
        """Slurm loses sight of a node whose processes live on."""
        self.machines[node].signal(signal.SIGKILL, only="slurmd")

    def hang(self, node: str) -> None:
        """Every process of a node stops."""
        self.machines[node].signal(signal.SIGSTOP)

    def cut(self, node: str, interface: str, how: str = "cable") -> None:
        super().cut(node, interface, how)
        self._cut.add((node, interface))

    def slow(self, node: str, interface: str, rate: str) -> None:
        """Let a node send no faster than `rate`, such as "2mbit" (a second), over a link."""
        shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        self.run(node, "tc", "qdisc", "replace", "dev", interface, "root", *shape)
        self._cut.add((node, interface))

    def heal(self, node: str, interface: str) -> None:
        """Mend a link that is broken or slow."""
        super().heal(node, interface)
        self.run(node, "tc", "qdisc", "del", "dev", interface, "root", check=False)
        self._cut.discard((node, interface))

    def boot(self, node: str) -> None:
        if not self.machines[node].up:
            self._cut -= {(node, "em4"), (node, "ib0")}
        super().boot(node)

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


def main(words: Sequence[str]) -> int:
    """A cluster for the length of one command on its login machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slurm", default="", help="one of the versions of versions.py")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    lab = Cluster(Path(tempfile.mkdtemp(prefix="lab-")), version=asked.slurm)
    try:
        lab.up()
        inside = lab.machines[LOGIN].inside(asked.command or ["bash"], Path.cwd())
        return subprocess.run(inside, env={**os.environ, **lab.environ}).returncode
    finally:
        lab.down()
        shutil.rmtree(lab.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
