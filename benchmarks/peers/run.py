"""Plays the scenarios with each peer, and writes what happened: docs/peers.jsonl.

    python benchmarks/peers/run.py [--peer NAME] [--scenario PATTERN] [--record FILE]

A row a peer and scenario: samples that came twice and that were missed, steps made again, whether
it hung, exit codes, and what a person had to do. A new row replaces the old one. Peers that are not
in the project's environment are in one of their own, build/peers, which `--install` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli
from job import Ended, Job, Start
from outcome import Notes, measured
from scenarios import How, Scenario, scenarios

from kempner.cluster.network.ports import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests"))
import records  # noqa: E402

RECIPES, ENVIRONMENT = HERE / "recipes", ROOT / "build" / "peers"
VERSIONS = """
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
"""
MOST_STARTS = 5
RANKS = 2


@dataclass(frozen=True)
class Peer:
    """As `peers.toml` has it."""

    name: str
    versions: Sequence[str]
    recipe: str
    command: str
    options: str
    apart: str = ""
    each: str = "node"
    signals: str = "started"
    source: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    warning: str = "SIGTERM"
    notice: float = 0.0
    requeues: int | str = ""
    pip: str = ""
    sees_hangs: bool = False
    without: Sequence[str] = ()
    only: Sequence[str] = ()

    @property
    def python(self) -> str:
        return str(ENVIRONMENT / "bin" / "python") if self.pip else sys.executable

    def plays(self, scenario: Scenario) -> bool:
        if scenario.how is How.HANG:
            return self.sees_hangs
        chosen = not self.only or scenario.name in (*self.only, "undisturbed")
        return chosen and scenario.name not in self.without

    def commands(self, ranks: int, apart: bool) -> list[tuple[list[str], dict[str, str]]]:
        """What the scheduler starts, and the variables of each."""
        words = {"python": self.python, "recipe": str(RECIPES / self.recipe), "ranks": str(ranks)}
        words["port"] = str(free_port("127.0.0.1", f"{os.getpid()} launcher"))
        line = self.apart if apart and self.apart else self.command
        command = [part.format_map(words) for part in shlex.split(line)]
        if self.each == "rank":
            return [(command, of_srun(rank, ranks)) for rank in range(ranks)]
        if apart and self.apart:
            return [(command, {}) for _ in range(ranks)]
        return [(command, {})]


def of_srun(rank: int, ranks: int) -> dict[str, str]:
    """What srun tells a task of a step on one node."""
    tasks = {"SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": ranks, "SLURM_PROCID": rank}
    place = {"SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_JOB_ID": 4242}
    return {**{name: str(n) for name, n in (tasks | place).items()}, "SLURM_JOB_NAME": "train"}


@dataclass
class History:
    """What a run took: its starts, and what a person did between them."""

    codes: list[list[int]] = field(default_factory=list)
    hung: int = 0
    by_itself: int = 0
    hands: list[str] = field(default_factory=list)
    error: str = ""


def play(peer: Peer, scenario: Scenario, folder: Path) -> History:
    """Start it until it is complete, as its scheduler and a person would."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir(parents=True)
    scontrol.write_text('#!/bin/sh\necho "$@" > "$PEERS_FOLDER/requeued"\n')
    scontrol.chmod(0o755)
    history, fruitless = History(), 0
    for number in range(1, MOST_STARTS + 1):
        ranks = scenario.ranks_after if (folder / "interrupt-now").exists() else RANKS
        before = Notes.read(folder).made()
        ended = start_once(peer, scenario, folder, number, ranks)
        history.codes.append(ended.codes)
        history.hung += ended.hung
        if all((folder / f"final-{rank}.pt").exists() for rank in range(ranks)):
            return history
        history.error = last_error(folder / f"start-{number}.out") or history.error
        fruitless = fruitless + 1 if Notes.read(folder).made() == before else 0
        if fruitless == 2:
            history.hands.append("gave up: two starts in a row made no step")
            return history
        if asks_for_requeue(peer, ended):
            history.by_itself += 1
        else:
            history.hands.append("killed what hung" if ended.hung else "started it again")
    return history


def start_once(peer: Peer, scenario: Scenario, folder: Path, number: int, ranks: int) -> Ended:
    pending = not (folder / "interrupt-now").exists()
    plan = {
        "start": number,
        "interrupt": scenario.place if pending else "",
        "rank": scenario.rank,
        "together": scenario.how is not How.HANG,
        "notice": peer.notice,
        "workers": scenario.workers,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    variables = {
        **peer.settings,
        "PATH": f"{folder / 'bin'}:{Path(peer.python).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PEERS_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1", f"{os.getpid()} ranks")),
    }
    commands = peer.commands(ranks, apart=scenario.how is How.APART)
    warning = signal.Signals[peer.warning]
    job = Job(Start(folder, number, commands, variables, warning, peer.signals == "ranks"))
    return job.wait(scenario.how if pending else How.NOT)


def asks_for_requeue(peer: Peer, ended: Ended) -> bool:
    if peer.requeues == "scontrol":
        return ended.requeue_asked
    return bool(peer.requeues) and ended.codes[0] == peer.requeues


def last_error(log: Path) -> str:
    """The last exception that it names, or its last line."""
    text = log.read_text(errors="replace")
    named = re.findall(r"\b\w+(?:Error|Exception): .+", text)
    return str((named or text.strip().split("\n"))[-1])[:200]


def row(peer: Peer, scenario: Scenario, folders: Path) -> dict[str, Any]:
    """Play one scenario; the undisturbed run stays for the others."""
    folder, began = folders / scenario.name, time.monotonic()
    history = play(peer, scenario, folder)
    found: dict[str, Any] = {"peer": peer.name, "scenario": scenario.name, "place": scenario.place}
    complete = (folder / "final-0.pt").exists()
    found["interrupted"] = (folder / "interrupt-now").exists()
    found |= {"options": peer.options, "source": peer.source, "complete": complete}
    if complete:
        same = scenario.how is not How.NOT and scenario.ranks_after == RANKS
        calm = folders / "undisturbed"
        found |= measured(folder, calm if same and (calm / "final-0.pt").exists() else None)
    found |= {"hung": history.hung, "codes": history.codes, "by_itself": history.by_itself}
    error = re.sub(r"/\S*/(site-packages|peers)/", "", history.error).replace(str(folder), "FOLDER")
    found |= {"hands": history.hands, "error": error if history.hands else ""}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def versions(peer: Peer) -> str:
    """Of the peer, and of what it was tried with."""
    asked = [peer.python, "-c", VERSIONS, *peer.versions]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def install(peers: Sequence[Peer]) -> None:
    """An environment with what is not the project's, on top of the project's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
    inner = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    (inner / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    wanted = sorted({word for peer in peers for word in peer.pip.split()})
    pip = [sys.executable, "-m", "pip", "--python", str(ENVIRONMENT / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", *wanted], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", default="")
    parser.add_argument("--scenario", default="")
    parser.add_argument("--record", type=Path, default=ROOT / "docs" / "peers.jsonl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where all that the runs leave is kept")
    parser.add_argument("--install", action="store_true")
    given = parser.parse_args()
    peers = [Peer(**entry) for entry in tomli.loads((HERE / "peers.toml").read_text())["peer"]]
    if given.install:
        install(peers)
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    chosen = [peer for peer in peers if peer.name == given.peer]
    for peer in chosen or [peer for peer in peers if given.peer in peer.name]:
        if peer.pip and not ENVIRONMENT.exists():
            print(f"{peer.name} is left out: --install makes its environment", file=sys.stderr)
            continue
        folders = Path(tempfile.mkdtemp(dir=given.folder)).resolve()
        for scenario in scenarios(given.seed):
            needed = scenario.name == "undisturbed" or re.search(given.scenario, scenario.name)
            if peer.plays(scenario) and needed:
                found = row(peer, scenario, folders)
                print(json.dumps(found), flush=True)
                told = {"of": versions(peer), **records.header(["benchmarks/peers"])}
                records.write(given.record, [found | told], ("peer", "scenario"))
                if not found["complete"] and scenario.how is How.NOT:
                    break  # it does not run here: its error is the row
        if given.folder is None:
            shutil.rmtree(folders)


if __name__ == "__main__":
    main()
