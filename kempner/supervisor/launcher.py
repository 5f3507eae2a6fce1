"""The small interface behind which ranks are started, signalled and ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kempner.run.launch import Launch
from kempner.supervisor.policy import RankExit


class Launcher(Protocol):
    """Starts one attempt's ranks. How they end, the control channel tells, too, where it can."""

    @property
    def address(self) -> str:
        """The address of this machine at which the ranks reach the supervisor."""

    def start(
        self, launch: Launch, arguments: Sequence[str], post: Callable[[RankExit], None]
    ) -> None:
        """Start every rank as `kempner train <arguments>`, with `launch` in its environment.

        `post` is called, from any thread, with each end that the launcher gets to see.
        """

    def ask_to_stop(self) -> None:
        """Signal every living rank to stop. Asking twice does no harm."""

    def kill(self) -> None:
        """End every living rank at once."""

    def alive(self) -> bool:
        """Whether anything that was started is still there; all ends have been posted if not."""
