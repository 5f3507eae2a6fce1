"""Requests for a trace of a running program: two small files for each rank.

`kempner profile` writes a request; the rank answers with the same id, once the trace is written.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from kempner.run.process.durable_io import replace_durable


@dataclass(frozen=True)
class ProfileRequest:
    id: str
    steps: int


@dataclass(frozen=True)
class ProfileAnswer:
    """Where the trace is, relative to the run's directory, or why there is none."""

    id: str
    files: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class ProfileMail:
    """The two files of a rank in the folder of an attempt."""

    folder: Path
    rank: int

    def ask(self, steps: int) -> ProfileRequest:
        """Write a request, which replaces an older one. Raises `OSError`."""
        request = ProfileRequest(secrets.token_hex(4), steps)
        self._write("asked", asdict(request))
        return request

    def asked(self) -> ProfileRequest | None:
        """The current request. Raises `OSError`."""
        content = self._read("asked")
        steps = content.get("steps")
        if not content.get("id") or not isinstance(steps, int):
            return None
        return ProfileRequest(str(content["id"]), max(1, steps))

    def answer(self, answer: ProfileAnswer) -> None:
        self._write("answer", asdict(answer))

    def answered(self, request: ProfileRequest) -> ProfileAnswer | None:
        """The rank's answer to this request; None before it. Raises `OSError`."""
        content = self._read("answer")
        files = content.get("files")
        if content.get("id") != request.id or not isinstance(files, list):
            return None
        return ProfileAnswer(request.id, tuple(map(str, files)), str(content.get("error", "")))

    def _path(self, what: str) -> Path:
        return self.folder / f"rank-{self.rank:05d}.profile-{what}.json"

    def _write(self, what: str, content: object) -> None:
        replace_durable(self._path(what), json.dumps(content).encode(), unique="kempner")

    def _read(self, what: str) -> dict[str, object]:
        """The content; empty if the file is missing or not of this form."""
        try:
            content = json.loads(self._path(what).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
