"""How long a stop of a run takes, for those that have joined it: its ledger tells."""

from __future__ import annotations

import threading
from functools import partial
from math import inf

from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.process.threads import start_thread
from kempner.run.record.events import PhaseDurationsLearned
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.monitors.phase_stats import PhaseStats
from kempner.supervisor.monitors.run_times import RunTimes


class StopTimes:
    """`times` is what is known of the run, whatever its number of ranks, which changes."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self.times = run, RunTimes()
        self._read_with: float | None = None
        self._reader: threading.Thread | None = None

    def update(self, left: float | None) -> None:
        """Have the ledger read when half of the time is over that was `left` when it was read last,
        in seconds (None: without end): a run learns, and a long ledger is not read often.

        By a thread: storage that does not answer must not keep the agent from leaving in time.
        """
        now = inf if left is None else left
        before = self._read_with
        due = before is None or (now < inf and now <= before / 2)
        if due and (self._reader is None or not self._reader.is_alive()):
            self._reader = start_thread("stop times", partial(self._read, now))

    def _read(self, left: float) -> None:
        try:
            history = RunHistory.read(self._run.ledger)
        except OSError as error:
            logger().info("the ledger cannot be read now", reason=error.strerror)
            return
        phases = PhaseStats()
        for event in history.events(PhaseDurationsLearned)[-1:]:
            if (steps := event.phases.get(Phase.STEP)) is not None:
                phases.took(Phase.STEP, steps.median + steps.spread)
        self.times.saves, self.times.phases = history.durations, phases
        self._read_with = left
