"""What a supervisor looks after, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from kempner.cluster.machine.job_place import process_began
from kempner.config.sections import Config
from kempner.run.control.launch_env import LaunchTerms
from kempner.run.control.trackers import open_trackers
from kempner.run.process.retry import storage_waits
from kempner.run.process.signals import SignalInbox
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.growth import Growth
from kempner.supervisor.hooks import Hooks, LedgerWithHooks
from kempner.supervisor.launchers.base import Launcher, Program
from kempner.supervisor.slurm.job_monitor import JobMonitor


@dataclass(frozen=True)
class SupervisorContext:
    """What a supervisor looks after, and with what; the same for all attempts."""

    run: RunDirectory
    launcher: Launcher
    program: Program
    config: Config
    signals: SignalInbox
    job: JobMonitor | None
    lease: Lease
    hooks: Hooks

    @cached_property
    def began(self) -> float | None:
        """When the supervisor's process began, or the batch script that became it."""
        began = process_began()
        return None if began is None else round(began, 3)

    @cached_property
    def ledger(self) -> Ledger:
        """Where the run's events go."""
        return LedgerWithHooks(self.run.ledger, self.hooks)

    @cached_property
    def history(self) -> RunHistory:
        """What the ledger tells, read once, and then what was added."""
        read = partial(RunHistory.read, self.run.ledger, self.ledger.unwritten)
        return storage_waits().retry(read, worked=True)

    @cached_property
    def growth(self) -> Growth:
        """What looks after the nodes without ranks."""
        return Growth(self.launcher, self.run, self.config, self.program.ours)

    def terms(self) -> LaunchTerms | None:
        """What a program of the user's own is told; ours reads the configuration."""
        section, patience = self.config.supervise, self.config.resilience.patience
        if self.program.ours:
            return None
        network = self.config.distributed.model_dump_json(exclude_unset=True)
        times = section.supervisor_timeout, section.stop_grace, patience
        trackers = open_trackers(self.run.trackers) if self.config.program.one_tracker_run else ""
        return LaunchTerms(self.run.path, *times, network, trackers)
