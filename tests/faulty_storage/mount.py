"""A mounted faulty file system, for tests: rules in, the log of what it did out."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import wait_until
from patience import scaled

from faulty_storage.rules import MARK, Rule

PROGRAM = Path(__file__).with_name("file_system.py")
DEVICE = Path("/dev/fuse")

LIBRARY = {"FUSE_LIBRARY_NAME": "fuse3"}
"""mfusepy prefers version 2, in which caches cannot be switched off from within."""

REQUIRE = "KEMPNER_REQUIRE_FUSE"
"""With this variable at 1, a test that needs FUSE fails where there is none; else it is skipped."""


def missing() -> str:
    """Why there can be no such file system here; empty if there can."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (Debian package fuse3)"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} is not there, or may not be used"
    return ""


@dataclass(frozen=True)
class Mount:
    """`folder` as it is, and `path`, through which it misbehaves."""

    folder: Path
    path: Path
    log: Path
    control: Path

    def add(self, rule: Rule) -> None:
        """Let a rule hold from now on."""
        self._ask("add", rule.to_json())

    def clear(self, name: str | None = None) -> None:
        """End a rule, or all of them; what hangs goes on."""
        self._ask("clear", name)

    def trace(self, on: bool = True) -> None:
        """Log every operation from now on, or none but faults."""
        self._ask("trace", on)

    def stage(self, name: str) -> str:
        """How far a rule is: waiting, armed, on, over; empty if there is none of this name."""
        return str(self._ask("state").get(name, ""))

    def faults(self, name: str | None = None) -> list[dict[str, Any]]:
        """What was injected (time, op, path, fault, rule), in all or by one rule."""
        return [
            line
            for line in self._lines()
            if line["fault"] not in ("", MARK) and name in (None, line["rule"])
        ]

    def marks(self, name: str) -> list[float]:
        """When operations were marked by a rule."""
        return [line["time"] for line in self._lines() if line["rule"] == name]

    def operations(self) -> list[tuple[str, str]]:
        """Kind and path of every operation that was traced, in their order."""
        return [(line["op"], line["path"]) for line in self._lines() if not line["fault"]]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def _ask(self, name: str, value: object = None) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(scaled(60))
            connection.connect(str(self.control))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps([name, value]) + "\n")
                stream.flush()
                return json.loads(stream.readline())


@contextmanager
def mounted(place: Path, believed: float = 0.0) -> Iterator[Mount]:
    """A faulty file system with all that belongs to it in the new folder `place`.

    Its client believes for `believed` seconds what it was told: what happens in the folder beside
    it is seen late.
    What still hangs in it when this ends goes on before it is unmounted.
    """
    short = Path(tempfile.mkdtemp(prefix="kempner-"))  # a socket's path has 107 characters at most
    mount = Mount(place / "folder", place / "mount", place / "faults.jsonl", short / "control")
    for folder in (mount.folder, mount.path):
        folder.mkdir(parents=True)
    arguments = (mount.folder, mount.path, mount.control, mount.log, believed)
    with open(place / "file_system.out", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **LIBRARY, "PYTHONPATH": str(PROGRAM.parents[1])},
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said == b"ready\n", (place / "file_system.out").read_text()
        wait_until(mount.path.is_mount, "the mount")
        yield mount
    finally:
        process.stdin.close()  # it unmounts
        try:
            process.wait(scaled(20))
        except subprocess.TimeoutExpired:
            process.kill()  # then every operation under way fails
            process.wait()
        process.stdout.close()
        shutil.rmtree(short)
        if str(mount.path) in Path("/proc/self/mounts").read_text():
            subprocess.run(["fusermount3", "-u", "-z", str(mount.path)], check=False)
