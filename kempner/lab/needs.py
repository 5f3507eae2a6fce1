"""What a lab needs of this machine, and a sentence about what is not there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kempner.lab.machines import NAMESPACES, ROOT_OF_ITS_OWN
from kempner.lab.services import PATH
from kempner.run.process.exit_codes import UsageError

INSTALL = "apt install slurm-wlm slurmdbd munge mariadb-server iproute2 nftables"

_TOOLS = (
    *("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db"),
    *("ip", "nft", "unshare", "nsenter", "setpriv", "hostname", "bash"),
)

_TRIAL = (
    "mount -t proc proc /proc && mount -t sysfs sysfs /sys && "
    "mount --bind /etc/hosts /etc/hosts && hostname trial && "
    "ip link add name trial type bridge && echo 'add table bridge lab' | nft -f -"
)
"""What a machine of a lab does first."""

_SWITCHES = {
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "kernel.unprivileged_userns_clone": "1",
}
"""Settings of Ubuntu's and Debian's kernels, and what lets all users make namespaces."""


def check() -> None:
    """Raises `UsageError` where there can be no lab."""
    lacking = lacking_tools()
    denied = "" if os.geteuid() == 0 or lacking else _denied_namespaces()
    if sentence := refusal(lacking, os.geteuid() == 0, denied, _settings()):
        raise UsageError(sentence)


def lacking_tools() -> list[str]:
    """Programs that a lab needs and that are not here."""
    return [tool for tool in _TOOLS if shutil.which(tool, path=PATH) is None]


def refusal(lacking: Sequence[str], root: bool, denied: str, settings: Mapping[str, str]) -> str:
    """Why there can be no lab, and what to do; empty if there can.

    `denied` is what this user is told who tries to make namespaces, `settings` are the kernel's.
    """
    if lacking:
        rights = "" if root else ", and root, or a kernel that lets this user make namespaces"
        return f"a lab needs {', '.join(lacking)}{rights}; on Debian and Ubuntu: {INSTALL}"
    if not denied:
        return ""
    wrong = [f"{name}={value}" for name, value in _SWITCHES.items() if settings.get(name) != value]
    wrong = [switch for switch in wrong if switch.partition("=")[0] in settings]
    allow = f", or allow them by `sysctl {wrong[0]}`" if wrong else ""
    return f"this user may not make namespaces ({denied}): run the lab as root{allow}"


def _denied_namespaces() -> str:
    """The last line of what this user is told who tries; empty if it works."""
    tried = subprocess.run(
        ["unshare", "--fork", *NAMESPACES, *ROOT_OF_ITS_OWN, "sh", "-c", _TRIAL],
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return said[-1] if tried.returncode else ""


def _settings() -> dict[str, str]:
    """Those of `_SWITCHES` that this kernel has."""
    places = {name: Path("/proc/sys", *name.split(".")) for name in _SWITCHES}
    return {name: path.read_text().strip() for name, path in places.items() if path.exists()}
