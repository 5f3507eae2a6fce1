"""The train state: where a run stands, all of its state that is not in a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Rollback:
    """The loss diverged, last at step `at`; the run rolled back to step `to`.

    The samples [`start`, `end`) of the endless order, from that checkpoint to the trouble, are left
    out from then on.
    """

    at: int
    to: int
    start: int
    end: int


@dataclass(frozen=True)
class TrainState:
    """Where the run stands.

    `step` steps are done, `cursor` is the next position in the endless order of samples, `tokens`
    counts what was trained on. `losses` are those of the last sound steps, the newest last, with
    which new ones are compared; `rollbacks` are all of the run so far.
    """

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    losses: tuple[float, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Back from what `dataclasses.asdict` gave; other fields are passed over.

        Raises `KeyError` or `TypeError` where they are of something else.
        """
        return cls(
            step=fields["step"],
            cursor=fields["cursor"],
            tokens=fields["tokens"],
            losses=tuple(fields.get("losses", ())),
            rollbacks=tuple(Rollback(**rollback) for rollback in fields.get("rollbacks", ())),
        )
