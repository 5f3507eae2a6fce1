"""The small interface behind which ranks are started, signalled and watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kempner.run.attempts import Attempt
from kempner.supervisor.policy import RankExit


class Launcher(Protocol):
    """Starts one attempt's ranks and tells how they end."""

    def start(self, attempt: Attempt, arguments: Sequence[str]) -> None:
        """Start every rank as `kempner train <arguments>`."""

    def ask_to_stop(self) -> None:
        """Ask every living rank to stop. Asking twice does no harm."""

    def kill(self) -> None:
        """End every living rank at once."""

    def ended(self) -> list[RankExit]:
        """Ranks that have ended since the last call, in no particular order."""

    def alive(self) -> bool:
        """Whether any rank is still there."""
