"""`GAVE_UP`: the file that says why kempner gave up, and prevents another start.

A chain of jobs would otherwise waste its time on an error that only a person can fix. Once it is
fixed, the user deletes the file. A command-line option instead would apply to every requeue of the
job.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any, Self

import tomli
import tomli_w

from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.retry import storage_waits
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class FirstFailure:
    """`rank` failed first, on `node`, at `step`; `raised` is the last line of its exception."""

    rank: int
    step: int = 0
    node: str = ""
    raised: str = ""

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" on {self.node}" if self.node else "")
        when = f"at step {self.step}" if self.step else "before the first step"
        return f"{where}, {when}" + (f": {self.raised}" if self.raised else "")


@dataclass(frozen=True)
class GaveUp:
    """Why the run cannot continue until a person has acted. `first` is the first failure, `see`
    lists files that tell more, `advice` is what to do."""

    code: ExitCode
    reason: str = ""
    attempt: int = 0
    first: FirstFailure | None = None
    see: list[str] = field(default_factory=list)
    advice: str = ""

    def fields(self) -> dict[str, Any]:
        """All known fields, in one flat table for JSON or TOML."""
        known = {name: getattr(self, name) for name in _PLAIN}
        first = {} if self.first is None else asdict(self.first)
        return {**known, **first, "code": int(self.code)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `fields`. Raises `KeyError`, `TypeError` or `ValueError` if they do not
        fit."""
        plain = {name: value for name, value in fields.items() if name in _PLAIN}
        rest = {name: value for name, value in fields.items() if name not in _PLAIN}
        first = FirstFailure(**rest) if rest else None
        return cls(**{**plain, "code": ExitCode(fields["code"])}, first=first)

    def __str__(self) -> str:
        lines = [self.headline, *([] if self.first is None else [f"  failed first: {self.first}"])]
        lines += [f"  see: {', '.join(self.see)}"] if self.see else []
        return "\n".join([*lines, *([f"  what to do: {self.advice}"] if self.advice else [])])

    @property
    def headline(self) -> str:
        return f"gave up after attempt {self.attempt}: {self.reason}"


_PLAIN = tuple(f.name for f in dataclass_fields(GaveUp) if f.name != "first")


class GaveUpError(RunError):
    """kempner gave up on the run earlier, with `code`."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


def write(run: RunDirectory, gave_up: GaveUp) -> None:
    content = tomli_w.dumps(gave_up.fields())
    replace_durable(run.gave_up, content.encode(), unique=secrets.token_hex(4))


def read(run: RunDirectory) -> GaveUp | None:
    """The content of `GAVE_UP`; None without the file. Any other file of that name, as by touch(1),
    counts, too."""
    try:
        read_text = partial(run.gave_up.read_text, encoding="utf-8")
        return GaveUp.from_fields(tomli.loads(storage_waits().retry(read_text)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IsADirectoryError, KeyError, TypeError, ValueError):
        return GaveUp(ExitCode.CRASHED)


def refuse_if_given_up(run: RunDirectory) -> None:
    if (gave_up := read(run)) is not None:
        raise GaveUpError(
            f"nothing was started: kempner gave up on this run before, and {run.gave_up} says why; "
            "when that is fixed, delete the file and start again",
            gave_up.code,
        )
