"""Bounds what ranks print into files of the attempt: the first and the last of it are kept.

A rank writes into its file by itself, appending, so that nothing slows it down and no reader can
block it. A thread looks at the sizes; from a file that has grown too large it takes the middle out.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.process.threads import helper_thread

EVERY = 1.0
"""Seconds between two looks; of many files, a hundredth of a second each."""

CLOSED_WITHIN = 5.0
"""Seconds for the last look: storage may hang."""

_PIECE = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Bytes of a file that are kept: the first `head`, and at least the last `tail`.

    A file is cut once it is larger than `most`; what was last in it by then is in a file beside it.
    """

    head: int = 16 << 20
    tail: int = 16 << 20
    most: int = 48 << 20


class OutputLimit:
    """Looks after the outputs in the folder of an attempt, from `start` until `close`."""

    def __init__(self, folder: Path, bounds: Bounds = Bounds()) -> None:
        self._folder, self._bounds = folder, bounds
        self._over = threading.Event()
        self._thread = helper_thread(self._serve, "outputs")
        self._told = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look for a last time."""
        self._over.set()
        self._thread.join(CLOSED_WITHIN)

    def _serve(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()
            looked_at = self._look()
            self._over.wait(max(EVERY, looked_at / 100))

    def _look(self) -> int:
        """Cut what is too large; how many files there are."""
        files = 0
        try:
            for path in self._folder.glob("rank-*.out"):
                files += 1
                if path.stat().st_size > self._bounds.most:
                    self._tell(path)
                    cut(path, self._bounds)
        except OSError as error:
            logger().info("cannot look at the ranks' output", error=str(error))
        return files

    def _tell(self, path: Path) -> None:
        if self._told:
            return
        self._told = True
        most, first = self._bounds.most >> 20, self._bounds.head >> 20
        logger().warning(
            f"a rank has printed more than {most} MiB: the first {first} MiB of each rank's output "
            f"in this attempt are kept, and the last of it, in {path} and {before(path).name}"
        )


def before(path: Path) -> Path:
    """Where the last part is of what was taken out of an output."""
    return path.with_name(f"{path.name}.before")


def cut(path: Path, bounds: Bounds) -> None:
    """Take out what is between the head and what comes from now on; its last part is kept beside.

    What is written in the milliseconds in which that happens is lost with the rest. Raises
    `OSError`.
    """
    with path.open("r+b") as file, before(path).open("wb") as kept:
        size = os.fstat(file.fileno()).st_size
        at = max(bounds.head, size - bounds.tail)
        while at < size and (piece := os.pread(file.fileno(), min(_PIECE, size - at), at)):
            kept.write(piece)
            at += len(piece)
        os.ftruncate(file.fileno(), bounds.head)
    said = f"\n[kempner: output was left out here; the last of it is in {before(path).name}]\n"
    with path.open("ab", buffering=0) as file:
        file.write(said.encode())
