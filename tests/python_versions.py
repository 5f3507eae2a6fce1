"""The tests of `make test` on each Python and torch that kempner allows: `make versions`.

    python tests/python_versions.py [--only WORD ...] [--list] [--record docs/versions.jsonl]

Each Python of 3.11 or later that is found on PATH or in pyenv gets a clone of this commit in
build/versions/ with an environment of its own, and the torch of constraints.txt; the first of them
also the oldest and the newest torch that pyproject.toml allows and that there is. Without the tests
on Slurm, which do not depend on either. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import records
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CLONES = ROOT / "build" / "versions"
OLDEST_PYTHON = Version("3.11")
PIN = re.compile(r"^torch==(\S+)", re.MULTILINE)
BROUGHT = re.compile(r"^(?:cuda-|nvidia-|triton==).*\n", re.MULTILINE)
"""Pins of what a build of torch brings along, each its own."""


@dataclass(frozen=True)
class Pair:
    """A Python, by its command, and a torch; both as versions, too."""

    python: Version
    command: str
    torch: Version

    @property
    def name(self) -> str:
        return f"python-{self.python}-torch-{self.torch}"


def pairs(
    pythons: Iterable[tuple[Version, str]], torches: Iterable[Version], pinned: Version
) -> list[Pair]:
    """Each Python with the torch that is pinned; then the first with the oldest and the newest."""
    known = sorted({version: (version, command) for version, command in pythons}.values())
    ours = [Pair(*python, pinned) for python in known]
    ends = sorted(torches)
    others = dict.fromkeys(torch for torch in ends[:1] + ends[-1:] if torch != pinned)
    return ours + [Pair(*known[0], torch) for torch in others]


def find_pythons() -> list[tuple[Version, str]]:
    """Those of 3.11 and later on PATH and in pyenv that can make an environment."""
    folders = [*os.environ["PATH"].split(os.pathsep)]
    folders += sorted(map(str, Path.home().glob(".pyenv/versions/*/bin")))
    found = []
    for command in (path for folder in folders for path in sorted(Path(folder).glob("python3.*"))):
        if re.fullmatch(r"python3\.\d+", command.name) and "shims" not in command.parts:
            ask = "import ensurepip, platform; print(platform.python_version())"
            said = subprocess.run([command, "-Ic", ask], capture_output=True, text=True)
            if said.returncode == 0 and Version(said.stdout) >= OLDEST_PYTHON:
                found.append((Version(said.stdout), str(command)))
    return found


def find_torches() -> list[Version]:
    """The releases that pyproject.toml allows and there are, up to the one that pip would take:
    what is configured for this machine may forbid later ones."""
    wanted = next(one for one in map(Requirement, read_requirements()) if one.name == "torch")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    ask = [*pip, "index", "versions", "torch"]
    said = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    listed = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    assert listed, said
    report = ["--no-deps", "--dry-run", "--ignore-installed", "--report", "-"]
    ask = [*pip, "install", "--quiet", *report, str(wanted)]
    took = json.loads(subprocess.run(ask, check=True, capture_output=True, text=True).stdout)
    newest = Version(took["install"][0]["metadata"]["version"]).public
    known = (Version(word) for word in listed[1].split(", ") if "+" not in word)
    return [one for one in wanted.specifier.filter(known) if one <= Version(newest)]


def read_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def test(pair: Pair) -> dict[str, object]:
    """A row: how the tests went on this pair."""
    clone, began = CLONES / pair.name, time.monotonic()
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    pins = clone / "constraints.txt"
    locked = pins.read_text()
    if f"torch=={pair.torch}\n" not in locked:
        pins.write_text(BROUGHT.sub("", PIN.sub(f"torch=={pair.torch}", locked)))
    results, log = clone / "results.xml", clone.with_name(f"{pair.name}.log")
    options = f"OPTIONS=--chosen --junit-xml={results}"
    make = ["make", "--no-print-directory", "pytest-others", f"PYTHON={pair.command}", options]
    with open(log, "wb") as output:
        subprocess.run(make, cwd=clone, stdout=output, stderr=output)
    ran = {"record": "versions", "Python": f"{pair.python}", "torch": f"{pair.torch}"}
    if not results.exists():
        why = last_line(log.read_text(errors="replace"))
        return ran | {"passed": 0, "skipped": 0, "failed": [why]}
    return ran | count(results) | {"seconds": round(time.monotonic() - began)}


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def count(results: Path) -> dict[str, object]:
    """What passed, by number, and what did not, by name."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if {part.tag for part in case} & {"failure", "error"}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    passed = len(cases) - len(failed) - len(skipped)
    return {"passed": passed, "skipped": len(skipped), "failed": names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="in a pair's name")
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl")
    asked = parser.parse_args(arguments)
    pinned = PIN.search((ROOT / "constraints.txt").read_text())
    assert pinned
    every = pairs(find_pythons(), find_torches(), Version(pinned[1]))
    wanted = [pair for pair in every if any(word in pair.name for word in asked.only)]
    failed = 0
    for pair in wanted:
        print(pair.name, flush=True)
        if asked.list:
            continue
        row = test(pair)
        print("", "\n ".join(records.table([row])), flush=True)
        failed += bool(row["failed"])
        if asked.record:
            command = f"python tests/python_versions.py --only {pair.name}"
            told = records.header(["kempner"], command)
            records.write(asked.record, [row | told], by=("Python", "torch"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
