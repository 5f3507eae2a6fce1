"""How long a stop of a run takes, for those that have joined it: its ledger tells."""

from __future__ import annotations

from math import inf

from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.record.events.health import PhaseDurationsLearned
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.monitors.run_times import RunTimes


class StopTimes:
    """`times` is what is known of the run, whatever its number of ranks, which changes."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self.times = run, RunTimes()
        self._read_with: float | None = None

    def update(self, left: float | None) -> None:
        """Read the ledger when half of the time is over that was `left` at the last look, in
        seconds (None: without end): a run learns, and a ledger that is long is not read often."""
        now = inf if left is None else left
        if self._read_with is not None and (now == inf or now > self._read_with / 2):
            return
        self._read_with = now
        try:
            history = RunHistory.read(self._run.ledger)
        except OSError as error:
            logger().info("the ledger cannot be read now", reason=error.strerror)
            return
        self.times.saves, found = history.durations, RunTimes().phases
        for event in history.events(PhaseDurationsLearned)[-1:]:
            if (steps := event.phases.get(Phase.STEP)) is not None:
                found.took(Phase.STEP, steps.median + steps.spread)
        self.times.phases = found
