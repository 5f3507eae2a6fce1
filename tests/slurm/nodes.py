"""Machines made of namespaces: each has a network, a host name, processes and mounts of its own.

A machine hangs on one process, `node.sh`. To end that process is to lose the machine's power as
far as its processes are concerned: the kernel ends all of them and takes the interfaces away. The
chain of parents ends with the process that made the machine, so nothing outlives a test session,
not even one that is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from patience import scaled

_SCRIPT = Path(__file__).with_name("node.sh")


@dataclass
class Machine:
    """A machine called `name` that keeps its files in the lab's `folder`."""

    name: str
    folder: Path
    environ: Mapping[str, str]
    _keeper: subprocess.Popen[str] | None = field(default=None, init=False)
    init: int = field(default=0, init=False)

    def boot(self) -> None:
        """Start the first process; it has only a loopback interface yet."""
        complaints = self.folder / "log" / f"{self.name}.log"
        with open(complaints, "ab") as log:
            self._keeper = self._start(log)
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not start: {complaints.read_text()}")
        self.init = int(line)

    def _start(self, log: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            # Whoever is killed takes the next one along: the session, unshare, node.sh, the node.
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child"),
                *("--net", "--uts", "--ipc", "--mount", "--pid"),
                *(str(_SCRIPT), self.name, str(self.folder)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=dict(self.environ),
            start_new_session=True,
        )

    @property
    def up(self) -> bool:
        """Whether the first process lives."""
        return self._keeper is not None and self._keeper.poll() is None

    def power_off(self) -> None:
        """End every process at once. Its connections are closed, as the kernel cleans up."""
        if self._keeper is not None and self._keeper.poll() is None:
            os.kill(self.init, signal.SIGKILL)
            self._keeper.wait(scaled(15))

    def inside(self, command: Sequence[str], cwd: Path) -> list[str]:
        """The command line that runs `command` in this machine."""
        assert self.up, f"{self.name} is down"
        enter = ["nsenter", "-t", str(self.init), "-n", "-u", "-i", "-m", "-p"]
        return [*enter, "env", "-C", str(cwd), *command]

    def processes(self) -> dict[int, str]:
        """Process id, as the outside numbers it, to name, of all but the first process.

        Those in a container of their own are among them: it has this machine's network.
        """
        network, outside = (Path(f"/proc/{which}/ns") for which in (self.init, "self"))
        ours, space = (network / "net").readlink(), (outside / "pid").readlink()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or (entry / "ns" / "net").readlink() != ours:
                    continue
                if (entry / "ns" / "pid").readlink() != space:  # that of whoever keeps the machine
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:  # it ended while we looked
                continue
        found.pop(self.init, None)
        return found

    def signal(self, number: signal.Signals, *, only: str = "", spare: Sequence[str] = ()) -> None:
        """Send a signal to every process, or to those called `only`, but to none in `spare`."""
        for pid, name in self.processes().items():
            if name not in spare and only in ("", name):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    def ip(self, *lines: str, check: bool = True) -> None:
        """Run commands of `ip` in this machine's network."""
        # Inside the network alone, `netns PID` means a process as the outside numbers it.
        subprocess.run(
            ["nsenter", "-t", str(self.init), "-n", "ip", "-force", "-batch", "-"],
            input="\n".join(lines) + "\n",
            text=True,
            check=check,
            capture_output=True,
        )


_NETWORKS = {"em4": ("10.20.0", 1500), "ib0": ("10.10.0", 2044)}
"""Interface to the first three parts of its addresses, and its MTU: management and IPoIB."""

SLURM_PORTS, SRUN_PORTS = "6817-6819", "61000-62999"
"""Those of Slurm's daemons and of srun: above the ephemeral ones, of which others get theirs."""

_GUARD = f"""
add table bridge lab
delete table bridge lab
table bridge lab {{
    chain forward {{
        type filter hook forward priority 0; policy accept;
        iifname "e-node*" oifname "e-node*" jump between_nodes
    }}
    chain between_nodes {{
        ether type arp accept
        tcp sport {{ {SLURM_PORTS}, {SRUN_PORTS} }} accept
        tcp dport {{ {SLURM_PORTS}, {SRUN_PORTS} }} accept
        drop
    }}
}}
"""
"""What passes from one node to another on em4, for nft(8)."""


@dataclass
class Switch:
    """Two networks, a bridge each, in a machine of their own: the host's network is untouched.

    Between nodes the bridge of em4 passes what is Slurm's, and drops the rest without a word.
    """

    machine: Machine

    def boot(self) -> None:
        self.machine.boot()
        for interface in _NETWORKS:
            self.machine.ip(f"link add br-{interface} type bridge", f"link set br-{interface} up")
        self.guard(True)

    def guard(self, on: bool) -> None:
        """Have em4 pass only what is Slurm's, or everything."""
        rules = _GUARD if on else "add table bridge lab\ndelete table bridge lab\n"
        subprocess.run(
            ["nsenter", "-t", str(self.machine.init), "-n", "nft", "-f", "-"],
            input=rules,
            text=True,
            check=True,
            capture_output=True,
        )

    def plug(self, node: Machine, interfaces: Sequence[str]) -> None:
        """Give a booted node its interfaces, with their addresses, up."""
        for interface in interfaces:
            port, mtu = _port(node, interface), _NETWORKS[interface][1]
            self.machine.ip(f"link del {port}", check=False)  # left by a crash
            self.machine.ip(
                f"link add {port} type veth peer name {interface} netns {node.init}",
                # On both ends: a port with a smaller MTU drops single large frames, and TCP hangs.
                f"link set {port} mtu {mtu}",
                f"link set {port} master br-{interface} up",
            )
            # The same after a reboot, as on any machine: its peers remember it.
            place = "".join(
                f":{int(part):02x}" for part in address(node.name, interface).split(".")
            )
            node.ip(
                f"link set {interface} address 02:00{place}",
                f"addr add {address(node.name, interface)}/24 brd + dev {interface}",
                f"link set {interface} mtu {mtu}",
                f"link set {interface} up",
            )

    def cut(self, node: Machine, interface: str, how: str) -> None:
        """Break a link.

        `cable`: the node sees that the carrier is gone. `admin`: the interface is set down in the
        node. `silent`: all looks well and nothing passes, as with a broken switch.
        """
        port = _port(node, interface)
        if how == "cable":
            self.machine.ip(f"link set {port} down")
        elif how == "silent":
            self.machine.ip(f"link set {port} nomaster")
        elif how == "admin":
            node.ip(f"link set {interface} down")
        else:
            raise ValueError(f"a link is cut by cable, admin or silent, not {how}")

    def heal(self, node: Machine, interface: str) -> None:
        """Undo `cut`; harmless on a link that is whole."""
        self.machine.ip(f"link set {_port(node, interface)} master br-{interface} up")
        node.ip(f"link set {interface} up")


def address(name: str, interface: str) -> str:
    """The address of login1 or of node K on an interface."""
    host = 1 if name == "login1" else 10 + int(name.removeprefix("node"))
    return f"{_NETWORKS[interface][0]}.{host}"


def _port(node: Machine, interface: str) -> str:
    return f"{interface[0]}-{node.name}"
