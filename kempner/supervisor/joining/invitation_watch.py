"""Sees whether a run invites others, and when another supervisor does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.threads import keep_running
from kempner.supervisor.launchers.agents.joined.invitation import Invitation

LOOK = 1.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class InvitationSeen:
    """It is another one than before, or none any more."""

    invitation: Invitation | None


class InvitationWatch:
    """Looks at a file, and posts what has changed."""

    def __init__(self, path: Path, post: Callable[[InvitationSeen], None]) -> None:
        self._path, self._post = path, post
        self._seen: Invitation | None = None

    def start(self) -> Invitation | None:
        """The invitation that is there now; changes are posted from a thread. Raises `UsageError`
        for one of another user."""
        self._look_once()
        found = self._seen
        keep_running("invitation", self._look)
        return found

    def _look(self) -> None:
        """For as long as this process lives."""
        while True:
            time.sleep(LOOK)
            try:
                self._look_once()
            except UsageError as error:
                logger().warning(str(error))

    def _look_once(self) -> None:
        try:
            found = Invitation.read(self._path)
        except OSError as error:
            logger().info("the invitation cannot be read now", reason=error.strerror)
            return
        if found != self._seen:
            self._seen = found
            self._post(InvitationSeen(found))
