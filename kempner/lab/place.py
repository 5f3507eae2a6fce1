"""The folder of a lab, its requirements of this machine, and how later commands find it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kempner.lab.cluster import Cluster
from kempner.lab.machines import NAMESPACES, ROOT_OF_ITS_OWN
from kempner.lab.services import PATH
from kempner.lab.slurm_conf import Options
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.lease import Holder

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
"""Commands that try what a machine of a lab needs."""

_SWITCHES = {
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "kernel.unprivileged_userns_clone": "1",
}
"""Settings of Ubuntu's and Debian's kernels that allow all users to create namespaces."""


def check() -> None:
    lacking = lacking_tools()
    denied = "" if os.geteuid() == 0 or lacking else _denied_namespaces()
    if sentence := refusal(lacking, os.geteuid() == 0, denied, _settings()):
        raise UsageError(sentence)


def lacking_tools() -> list[str]:
    return [tool for tool in _TOOLS if shutil.which(tool, path=PATH) is None]


def refusal(lacking: Sequence[str], root: bool, denied: str, settings: Mapping[str, str]) -> str:
    """Why a lab cannot run here, and what to do; empty if it can. `denied` is the error of this
    user's attempt to create namespaces, `settings` are the kernel's."""
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
    """The last line of the error of `_TRIAL` in new namespaces; empty if it works."""
    tried = subprocess.run(
        ["unshare", "--fork", *NAMESPACES, *ROOT_OF_ITS_OWN, "sh", "-c", _TRIAL],
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return lines[-1] if tried.returncode else ""


def _settings() -> dict[str, str]:
    places = {name: Path("/proc/sys", *name.split(".")) for name in _SWITCHES}
    return {name: path.read_text().strip() for name, path in places.items() if path.exists()}


_RECORD = "lab.json"
_LONGEST = 80
"""Longest path of a lab's folder, since paths of sockets are limited."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """The default folder of a lab."""
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/") / ".local" / "state"
    return Path(state) / "kempner" / "lab"


def claim(folder: Path, options: Options) -> Cluster:
    """Create `folder` for a new lab; an ended lab in it is removed. Raises `UsageError`."""
    if not re.fullmatch(r"[\w./+-]+", str(folder), re.ASCII) or len(str(folder)) > _LONGEST:
        raise UsageError(
            f"{folder} cannot be the folder of a lab: Slurm takes at most {_LONGEST} letters, "
            "digits and ._+-/; name another one by --dir"
        )
    if (folder / _RECORD).exists():
        if (lab := recorded(folder)).switch.machine.up:
            raise UsageError(f"a lab is up in {folder}: `kempner lab down` ends it")
        remove(lab)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty, and no lab; name a new folder by --dir")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECORD).write_text(json.dumps(_here() | {"options": asdict(options)}))
    return Cluster(folder, options)


def find(folder: Path) -> Cluster:
    if not (folder / _RECORD).exists():
        raise UsageError(f"no lab is up in {folder}; `kempner lab up` starts one")
    lab = recorded(folder)
    if not lab.switch.machine.up:
        raise UsageError(f"the lab in {folder} has ended; `kempner lab up` starts a new one")
    return lab


def recorded(folder: Path) -> Cluster:
    """The lab in `folder`, up or not. Raises `UsageError` if it is of another user or machine."""
    if not (folder / _RECORD).exists():
        raise UsageError(f"there is no lab in {folder}")
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"the lab in {folder} is that of user {owner}, who alone can use it")
    record = json.loads((folder / _RECORD).read_text())
    if sentence := elsewhere(record, _here()):
        raise UsageError(f"the lab in {folder} {sentence}")
    if record["boot"] != _here()["boot"]:  # its process ids may be other processes' by now
        shutil.rmtree(folder / "machines", ignore_errors=True)
    return Cluster(folder, Options(**record["options"]))


def elsewhere(record: Mapping[str, Any], here: Mapping[str, str]) -> str:
    """Why a lab cannot be used from `here`; empty if it can."""
    if record["boot"] == here["boot"]:
        outside = record["space"] == here["space"]
        return "" if outside else "cannot be used from a container or its own machines: leave first"
    return "" if record["host"] == here["host"] else f"is on {record['host']}; use it there"


def _here() -> dict[str, str]:
    """This host, its boot, and this process's namespace."""
    holder = Holder.here(0.0)
    boot, _, space = holder.machine.partition("/")
    return {"host": holder.host, "boot": boot, "space": space}


def remove(lab: Cluster) -> None:
    lab.down()
    shutil.rmtree(lab.folder)
