"""Traces steps of this rank, from the configuration or requested by `kempner profile`. An untraced
step costs one comparison: the training thread reads no file."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kempner.config.sections import ProfilingSection
from kempner.run.output.logs import logger
from kempner.run.record.profile_request import ProfileAnswer, ProfileMail, ProfileRequest
from kempner.run.record.run_dir import RunDirectory

LOOK_EVERY = 2.0
"""Seconds between two looks for a request, by a thread that may hang with storage."""

LAST_WAIT = 2.0
"""Seconds to wait at the end for a trace to be written."""

LONGEST = 20
"""Most steps in a trace: more take gigabytes, and no viewer opens them."""


@dataclass(frozen=True)
class Span:
    """Steps to trace, and the request for them; None if they are from the configuration."""

    first: int
    last: int
    request: ProfileRequest | None = None


def due(section: ProfilingSection, rank: int, step: int) -> Span | None:
    """The configured trace that begins with this step."""
    if rank in section.ranks and step in section.steps:
        return Span(step, step + min(section.length, LONGEST) - 1)
    return None


class Profiler:
    """Traces a rank. Call `begin` before each step, `end` after it, and `close` at the end. Errors
    of a trace are logged, and do not affect training."""

    def __init__(
        self, section: ProfilingSection, run: RunDirectory, attempt: int, rank: int, gpu: bool
    ) -> None:
        self._section, self._run, self._rank, self._gpu = section, run, rank, gpu
        self._mail = ProfileMail(run.attempt(attempt), rank)
        self._asked: ProfileRequest | None = None
        self.begins_at = self._next_after(0)
        """The first step with which a trace may begin: `begin` need not be called before it."""
        self.tracing = False
        """Whether a trace is active: `end` need be called only then."""
        self._span: Span | None = None
        self._trace: Any = None
        self._writer: threading.Thread | None = None
        self._over = threading.Event()
        threading.Thread(target=self._look, name="profile-requests", daemon=True).start()

    def begin(self, step: int) -> None:
        if self._span is not None or (self._writer is not None and self._writer.is_alive()):
            return
        self.begins_at = self._next_after(step)
        request, self._asked = self._asked, None
        if request is not None:
            self._span = Span(step, step + min(request.steps, LONGEST) - 1, request)
        else:
            self._span = due(self._section, self._rank, step)
        if self._span is not None:
            self.tracing = True
            self._start()

    def end(self, step: int) -> None:
        if self._span is None or step < self._span.last:
            return
        span, self._span, self.tracing = self._span, None, False
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            trace.stop()
        except RuntimeError as error:
            self._tell(span, error=_lost(span, error))
            return
        # In a thread: storage may hang, and no step must wait for a trace.
        self._writer = threading.Thread(
            target=self._finish, args=(span, trace), name="profile-writer", daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """End; an unfinished trace, or one that cannot be written now, is dropped."""
        self._over.set()
        if self._writer is not None:
            self._writer.join(LAST_WAIT)
        if self._trace is not None:
            with suppress(RuntimeError):
                self._trace.stop()
            self._trace = None

    def _next_after(self, step: int) -> float:
        steps = self._section.steps if self._rank in self._section.ranks else ()
        return min((later for later in steps if later > step), default=math.inf)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        assert self._span is not None
        try:
            if self._memory:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
            trace = profile(activities=kinds, record_shapes=True)
            trace.start()
            self._trace = trace
        except RuntimeError as error:
            self._trace = None
            self._tell(self._span, error=f"no trace can be made: {error}")

    def _finish(self, span: Span, trace: Any) -> None:
        """Write a finished trace and report it; runs in its own thread."""
        try:
            files = self._write(span, trace)
        except (OSError, RuntimeError) as error:
            self._tell(span, error=_lost(span, error))
        else:
            logger().info("wrote a trace", file=files[0])
            self._tell(span, files=files)

    def _write(self, span: Span, trace: Any) -> list[str]:
        """Raises `OSError` or `RuntimeError`."""
        folder = self._run.profiles
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{span.first:08d}-rank-{self._rank:05d}"
        path, temporary = folder / f"{name}.json.gz", folder / f".{name}.json.gz"
        trace.export_chrome_trace(str(temporary))
        temporary.replace(path)
        files = [path]
        if self._memory:
            files.append(folder / f"{name}.pickle")
            torch.cuda.memory._dump_snapshot(str(files[-1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        self._prune(folder, files)
        return [str(file.relative_to(self._run.path)) for file in files]

    @property
    def _memory(self) -> bool:
        return self._gpu and self._section.memory

    def _prune(self, folder: Path, new: Collection[Path]) -> None:
        """Delete the oldest traces of this rank."""
        mine = sorted(folder.glob(f"step-*-rank-{self._rank:05d}.json.gz"), key=_age)
        for old in mine[: -self._section.keep]:
            if old not in new:
                old.unlink(missing_ok=True)
                old.with_name(old.name.removesuffix(".json.gz") + ".pickle").unlink(missing_ok=True)

    def _tell(self, span: Span, files: Collection[str] = (), error: str = "") -> None:
        if error:
            logger().warning(error)
        if span.request is not None:
            with suppress(OSError):  # `kempner profile` then reports a missing answer
                self._mail.answer(ProfileAnswer(span.request.id, tuple(files), error))

    def _look(self) -> None:
        last = ""
        while not self._over.wait(LOOK_EVERY):
            with suppress(OSError):
                request = self._mail.asked()
                if request is not None and request.id != last:
                    last, self._asked, self.begins_at = request.id, request, 0


def _lost(span: Span, error: Exception) -> str:
    return f"the trace of steps {span.first} to {span.last} is lost: {error}"


def _age(path: Path) -> float:
    return path.stat().st_mtime
