"""Machines made of Linux namespaces: each has its own network, host name, processes and mounts.

A machine lives as long as one process, `node.sh`. Killing it is a power loss for the machine: the
kernel kills all of its processes and removes the interfaces. All machines are in the process
namespace of the switch, so they end with it, whatever started them.

Only root may create namespaces, unless they belong to a user namespace. Without root, the switch
has a user namespace in which this user is root; programs on a machine run as this user again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kempner.run.process.exit_codes import RunError
from kempner.run.process.whereabouts import start_ticks

_SCRIPT = Path(__file__).with_name("node.sh")

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
ROOT_OF_ITS_OWN = () if os.geteuid() == 0 else ("--user", "--map-root-user")
"""Options of unshare(1): for every machine, and in addition for the first one."""

_ENTER = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
_AS_USER = (
    ()
    if os.geteuid() == 0
    else ("unshare", "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}")
)
"""Maps root of the switch's user namespace back to this user: as root Slurm's daemons drop groups,
which a user namespace does not allow."""


def wait_until(
    condition: Callable[[], object], what: str, seconds: float, interval: float = 0.05
) -> None:
    """Wait until `condition()` is true. Raises `RunError` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RunError(f"not within {seconds:.0f} s: {what}")
        time.sleep(interval)


@dataclass(frozen=True)
class Machine:
    """A machine called `name`, with files in the lab's `folder`. `host` is the machine in whose
    process namespace it lives. Without one it ends with the process that boots it if it is `bound`,
    else only when it is powered off."""

    name: str
    folder: Path
    environ: Mapping[str, str]
    host: Machine | None = None
    bound: bool = False

    def boot(self) -> None:
        complaints = self.folder / "log" / f"{self.name}.log"
        with open(complaints, "ab") as log, open(_SCRIPT, "rb") as script:
            keeper = self._start(script, log)
        try:
            with keeper.stdout as pipe:  # type: ignore[union-attr]  # it is a pipe
                line = pipe.readline()
            if not line:
                raise RunError(f"{self.name} did not start: {complaints.read_text().strip()}")
            self._record.write_text(f"{int(line)} {start_ticks(int(line))}")
        except BaseException:  # such as a Ctrl-C: later commands could not find it
            keeper.kill()
            raise

    def _start(self, script: IO[bytes], log: IO[bytes]) -> subprocess.Popen[str]:
        # The death of each kills the next: a bound session, unshare, node.sh, the machine.
        make = ["unshare", "--fork", "--kill-child", *NAMESPACES]
        if self.host is not None:
            command = [*_enter(self.host.init, "--pid"), *make]
        else:
            bound = ["setpriv", "--pdeathsig", "KILL"] if self.bound else []
            command = [*bound, *make, *ROOT_OF_ITS_OWN]
        return subprocess.Popen(
            [*command, "bash", "-s", self.name, str(self.folder)],
            stdin=script,  # in a user namespace its path may not be readable
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=dict(self.environ),
            start_new_session=True,
        )

    @property
    def _record(self) -> Path:
        return self.folder / "machines" / self.name

    @property
    def init(self) -> int:
        """The process id, outside of the machine, of its first process; 0 if that is gone."""
        try:
            pid, ticks = map(int, self._record.read_text().split())
        except FileNotFoundError:
            return 0
        return pid if start_ticks(pid) == ticks else 0

    @property
    def up(self) -> bool:
        return self.init != 0

    def power_off(self) -> None:
        """Kill all processes at once. The kernel closes their connections."""
        if init := self.init:
            os.kill(init, signal.SIGKILL)
            wait_until(lambda: not self.up, f"{self.name} is off", 60)

    def inside(self, command: Sequence[str], cwd: Path) -> list[str]:
        """The command line that runs `command` in this machine. Raises `RunError`."""
        if not (init := self.init):
            raise RunError(f"{self.name} is down")
        return [*_enter(init, *NAMESPACES), *_AS_USER, "env", "-C", str(cwd), *command]

    def processes(self) -> dict[int, str]:
        """The names of all processes but the first, by process id outside of the machine; including
        those in containers, which have the machine's network."""
        init = self.init
        ours = Path(f"/proc/{init}/ns/net").readlink()
        keepers = [os.getpid(), *([self.host.init] if self.host else [])]
        spaces = [Path(f"/proc/{keeper}/ns/pid").readlink() for keeper in keepers]
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or (entry / "ns" / "net").readlink() != ours:
                    continue
                if (entry / "ns" / "pid").readlink() not in spaces:  # else it keeps the machine
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:  # it ended while we looked
                continue
        found.pop(init, None)
        return found

    def signal(self, number: signal.Signals, *, only: str = "", spare: Sequence[str] = ()) -> None:
        """Send a signal to all processes, or only to those called `only`, except those in
        `spare`."""
        for pid, name in self.processes().items():
            if name not in spare and only in ("", name):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    def ip(self, *lines: str, check: bool = True) -> None:
        # Entering only the network namespace, `netns PID` takes a process id of the outside.
        self.on_network("ip", "-force", "-batch", "-", text="\n".join(lines) + "\n", check=check)

    def on_network(self, *command: str, text: str = "", check: bool = True) -> str:
        """Run a command as root of the machine's network, with `text` as its input; its output."""
        done = subprocess.run(
            [*_enter(self.init, "--net"), *command],
            env=dict(self.environ),
            input=text,
            text=True,
            capture_output=True,
        )
        if check and done.returncode:
            raise RunError(f"{command[0]} failed for {self.name}: {done.stderr.strip()}")
        return done.stdout


def _enter(init: int, *namespaces: str) -> list[str]:
    return ["nsenter", f"--target={init}", *_ENTER, *namespaces]


_NETWORKS = {"em4": ("10.20.0", 1500), "ib0": ("10.10.0", 2044)}
"""The prefix of the addresses and the MTU of each interface: management and IPoIB."""

SLURM_PORTS, SRUN_PORTS = "6817-6819", "61000-62999"
"""The ports of Slurm's daemons, and of srun: above the ephemeral range, which other programs
use."""

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
"""The filter between nodes on em4, for nft(8)."""


@dataclass(frozen=True)
class Switch:
    """Two networks, each a bridge, in a separate machine. Between nodes the bridge of em4 passes
    only Slurm's traffic, and silently drops the rest."""

    machine: Machine

    def boot(self) -> None:
        self.machine.boot()
        for interface in _NETWORKS:
            self.machine.ip(f"link add br-{interface} type bridge", f"link set br-{interface} up")
        self.guard(True)

    def guard(self, on: bool) -> None:
        rules = _GUARD if on else "add table bridge lab\ndelete table bridge lab\n"
        self.machine.on_network("nft", "-f", "-", text=rules)

    def plug(self, node: Machine, interfaces: Sequence[str]) -> None:
        """Create and configure the interfaces of a booted node."""
        for interface in interfaces:
            port, mtu = _port(node, interface), _NETWORKS[interface][1]
            self.machine.ip(f"link del {port}", check=False)  # left by a crash
            self.machine.ip(
                f"link add {port} type veth peer name {interface} netns {node.init}",
                # On both ends: a smaller MTU on one drops large frames, and TCP hangs.
                f"link set {port} mtu {mtu}",
                f"link set {port} master br-{interface} up",
            )
            # The same MAC address after a reboot, which peers have cached.
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
        """Break a link. `cable`: the node loses the carrier. `admin`: the interface is set down in
        the node. `silent`: the link looks up but passes nothing, as with a broken switch."""
        port = _port(node, interface)
        if how == "cable":
            self.machine.ip(f"link set {port} down")
        elif how == "silent":
            self.machine.ip(f"link set {port} nomaster")
        elif how == "admin":
            node.ip(f"link set {interface} down")
        else:
            raise ValueError(f"a link is cut by cable, admin or silent, not {how}")

    def cut_off(self, nodes: Iterable[Machine]) -> list[str]:
        """The cut links of the nodes that are up, such as "node2 ib0"."""
        links = self.machine.on_network("ip", "-json", "link")
        ports = {port["ifname"]: port for port in json.loads(links)}
        whole = [name for name, port in ports.items() if "master" in port and "UP" in port["flags"]]
        return [
            f"{node.name} {interface}"
            for node in nodes
            for interface in _NETWORKS
            if node.up and (port := _port(node, interface)) in ports and port not in whole
        ]

    def heal(self, node: Machine, interface: str) -> None:
        """Undo `cut`; no effect on an intact link."""
        self.machine.ip(f"link set {_port(node, interface)} master br-{interface} up")
        node.ip(f"link set {interface} up")


def address(name: str, interface: str) -> str:
    host = 1 if name == "login1" else 10 + int(name.removeprefix("node"))
    return f"{_NETWORKS[interface][0]}.{host}"


def _port(node: Machine, interface: str) -> str:
    return f"{interface[0]}-{node.name}"
