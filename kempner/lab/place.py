"""Where a lab is, and how later commands find it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kempner.lab.cluster import Cluster
from kempner.lab.slurm_conf import Options
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.lease import Holder

_RECORD = "lab.json"
_LONGEST = 80
"""Characters of a folder in which sockets have room."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """Where a lab is that was given no folder."""
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/") / ".local" / "state"
    return Path(state) / "kempner" / "lab"


def claim(folder: Path, options: Options) -> Cluster:
    """A new lab in `folder`, which is made; what one has left there that has ended is removed.

    Raises `UsageError`.
    """
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
    """The lab that is up in `folder`. Raises `UsageError`."""
    if not (folder / _RECORD).exists():
        raise UsageError(f"no lab is up in {folder}; `kempner lab up` starts one")
    lab = recorded(folder)
    if not lab.switch.machine.up:
        raise UsageError(f"the lab in {folder} has ended; `kempner lab up` starts a new one")
    return lab


def recorded(folder: Path) -> Cluster:
    """The lab of `folder`, up or not. Raises `UsageError` for one of another user or machine."""
    if not (folder / _RECORD).exists():
        raise UsageError(f"there is no lab in {folder}")
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"the lab in {folder} is that of user {owner}, who alone can use it")
    record = json.loads((folder / _RECORD).read_text())
    if sentence := elsewhere(record, _here()):
        raise UsageError(f"the lab in {folder} {sentence}")
    if record["boot"] != _here()["boot"]:  # its process ids may be those of others now
        shutil.rmtree(folder / "machines", ignore_errors=True)
    return Cluster(folder, Options(**record["options"]))


def elsewhere(record: Mapping[str, Any], here: Mapping[str, str]) -> str:
    """Why a lab, up or not, cannot be seen from `here`; empty if it can."""
    if record["boot"] == here["boot"]:
        outside = record["space"] == here["space"]
        return "" if outside else "cannot be used from a container or its own machines: leave first"
    return "" if record["host"] == here["host"] else f"is on {record['host']}; use it there"


def _here() -> dict[str, str]:
    """This machine, its boot and the process namespace that we are in."""
    holder = Holder.here(0.0)
    boot, _, space = holder.machine.partition("/")
    return {"host": holder.host, "boot": boot, "space": space}


def remove(lab: Cluster) -> None:
    """End all that a lab runs, and remove its folder."""
    lab.down()
    shutil.rmtree(lab.folder)
