"""Makes old runs of the kempner that is installed, for later ones to go on with.

    PYTHONPATH=tests PYTHON tests/old_runs/make.py

with the Python of an environment in which a clean checkout is installed; writes COMMIT.tar.xz here.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

import kempner
from old_runs import (
    HERE,
    PROGRAMS,
    RUNS,
    OldRun,
    as_json,
    bits_of_this_machine,
    final_digest,
    steps_of,
)

PACKAGES = ("accelerate", "lightning", "numpy", "torch", "transformers")
STOP_AT, KILL_AT = 15, 18
"""Steps; there is a commit every five."""

TROUBLES: Mapping[str, dict[str, str]] = {
    "one_rank": {"KEMPNER_FAULTS": "slow rank 0 by 50 from step 1"},  # or it is over too soon
    "two_ranks": {"KEMPNER_FAULTS": "slow rank 0 by 50 from step 1"},
    "killed": {"KEMPNER_FAULTS": f"hang rank 1 at step {KILL_AT}"},
}


def main() -> None:
    commit = _git("rev-parse", "--short", "HEAD")
    assert not _git("status", "--porcelain", "kempner"), "the checkout is not clean"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made = {run.name: make(run, root) for run in RUNS}
        about = {
            "commit": commit,
            "python": platform.python_version(),
            "versions": {package: version(package) for package in PACKAGES},
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "bits": bits_of_this_machine(),
            "runs": made,
        }
        (root / "made.json").write_text(json.dumps(about))
        with tarfile.open(HERE / f"{commit}.tar.xz", "w:xz", preset=9) as archive:
            for name in ("made.json", *(run.name for run in RUNS)):
                archive.add(root / name, name, filter=_neutral)


def _git(*words: str) -> str:
    checkout = Path(kempner.__file__).parents[1]
    done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make(run: OldRun, root: Path) -> dict[str, object]:
    """The run, unfinished, in a folder of its name; what it did, and what it does undisturbed."""
    calm, folder = root / f"calm-{run.name}", root / run.name
    for path in (calm, folder):
        _set_up(path, run)
    assert _start(run, calm, {}).wait() == 0, (calm / "out.txt").read_text()
    process = _start(run, folder, {"STOP_AT": str(STOP_AT), **TROUBLES.get(run.name, {})})
    if run.name == "killed":
        _wait_for(lambda: _said(folder, "injecting fault"))
        _kill(process)
    else:
        if run.name in TROUBLES:
            metrics = folder / run.record / "metrics.jsonl"
            _wait_for(lambda: metrics.exists() and f'"step": {STOP_AT},' in metrics.read_text())
            process.send_signal(signal.SIGTERM)
        assert process.wait() == 75, (folder / "out.txt").read_text()
    checkpoints = folder / run.record / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").readlink()
    for earlier in checkpoints.glob("step-*"):
        if earlier != latest:
            shutil.rmtree(earlier)  # the archive is to stay small
    _neutralise(folder)
    return {
        "saved": int(latest.name.removeprefix("step-")),
        "made": max(steps_of(folder, run)),
        "steps": as_json(steps_of(calm, run)),
        "final": final_digest(calm, run),
    }


def _set_up(folder: Path, run: OldRun) -> None:
    folder.mkdir()
    if "--" in run.command:
        shutil.copy(PROGRAMS / "notes.py", folder)
        shutil.copy(PROGRAMS / f"{run.name}.py", folder)
        return
    shutil.copy(PROGRAMS / "run.toml", folder)
    words = [f"step {n} of {n * n % 977} follows {n - 1}" for n in range(160)]
    (folder / "text.txt").write_text("\n".join(words))
    prepare = [sys.executable, "-m", "kempner", "prepare", "--out", "tokens", "text.txt"]
    subprocess.run(prepare, cwd=folder, check=True, capture_output=True)


def _start(run: OldRun, folder: Path, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "kempner", "supervise", f"--nproc={run.ranks}", *run.command]
    with open(folder / "out.txt", "wb") as out:
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdout=out, stderr=out, start_new_session=True
        )


def _said(folder: Path, words: str) -> bool:
    return any(words in path.read_text() for path in folder.rglob("*.jsonl"))


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The supervisor and its ranks, all at once."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.suspend()
    for member in family:
        member.kill()
    psutil.wait_procs(family[1:])
    process.wait()


def _neutralise(folder: Path) -> None:
    """Nothing tells of the machine that made it. Only logs and the lease name that."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    names = {
        str(folder): "/home/user/project",
        str(Path(sys.executable).parents[1]): "/home/user/env",
        str(Path(kempner.__file__).parents[1]): "/home/user/kempner",
        f'"{socket.gethostname()}"': '"node1"',
        machine: "00000000-0000-0000-0000-000000000000",
    }
    (folder / "out.txt").unlink()
    for path in folder.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts and path.parent.name != "tokens":
            content = path.read_bytes()
            for name, neutral in names.items():
                content = content.replace(name.encode(), neutral.encode())
            path.write_bytes(content)


def _neutral(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if "__pycache__" in member.name else member


if __name__ == "__main__":
    main()
