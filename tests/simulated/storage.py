"""The shared disk of a simulated run: who changes what, and what fails there."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kempner.checkpoint.format.manifest import Identity, Manifest, TrainState
from kempner.checkpoint.format.names import LATEST, WITHDRAWN, parse_step
from kempner.run.record.attempts import Attempt, begin_attempt
from kempner.run.record.run_dir import RunDirectory
from simulated.checks.oracle import Oracle
from simulated.engine import Engine
from simulated.faults import Fault, Kind
from simulated.files import Disk, Place

_EMPTY_IDENTITY = Identity(1, {}, 0, None, {})


class Died(BaseException):
    """The process that was about to change something on disk is killed."""


class Storage(ABC):
    """Where the run lies. Every change that counts is shown to the oracle."""

    def __init__(self, oracle: Oracle) -> None:
        self.engine, self.oracle = Engine(), oracle
        self.disk = Disk()
        self.disk.before = self._before_change
        self.disk.root["run"] = {}
        self.run = RunDirectory(self.disk.place("run"))  # type: ignore[arg-type]
        self.full_until = 0.0
        self.commit_fault: Fault | None = None
        self.save_fails, self.save_slow = False, 1.0
        self._damaged: list[Manifest] = []
        self._actor, self._changes = 0, -1

    @abstractmethod
    def struck_by(self, fault: Fault) -> None:
        """Take note of a fault that has happened."""

    @abstractmethod
    def start_second(self) -> None:
        """A person starts the run again while it runs."""

    def begin_attempt(self) -> Attempt:
        """A new attempt; from now on it alone may commit."""
        attempt = begin_attempt(self.run)
        self.oracle.current = attempt.number
        return attempt

    def act_as(self, attempt: int, committing: bool = False) -> None:
        """What is changed on disk from now on is changed by this attempt."""
        self._actor, self._changes = attempt, 0 if committing else -1

    def manifest(self, train_state: TrainState, attempt: int) -> Manifest:
        """What a commit of this train state says."""
        return Manifest(train_state, _EMPTY_IDENTITY, attempt, self.engine.now, {})

    def is_damaged(self, manifest: Manifest) -> bool:
        """Whether the files of a checkpoint were damaged."""
        return any(manifest is damaged for damaged in self._damaged)

    def take_save_faults(self) -> tuple[bool, float]:
        """Whether this save is to fail, and how many times as long it takes."""
        taken = self.save_fails, self.save_slow
        self.save_fails, self.save_slow = False, 1.0
        return taken

    def damage(self, manifest: Manifest) -> None:
        """Flip bits in the files of a checkpoint."""
        self._damaged.append(manifest)

    def _before_change(self, name: str, place: Place, entry: object) -> None:
        if self._changes >= 0:
            self._changes += 1
            fault = self.commit_fault
            if fault is not None and self._changes >= fault.amount and self._may(fault, name):
                self.commit_fault = None
                self.struck_by(fault)
                if fault.kind is Kind.TORN:
                    raise Died
                self._second_comes_first()
        if name == "rename":
            self._check_rename(place, entry)

    @staticmethod
    def _may(fault: Fault, name: str) -> bool:
        """No attempt comes between a check of the fence and the change right after it."""
        return fault.kind is Kind.TORN or name in ("write", "fsync")

    def _second_comes_first(self) -> None:
        """Another attempt is begun in the middle of a commit."""
        committing = self._actor, self._changes
        self.act_as(0)
        self.start_second()
        self.begin_attempt()
        self._actor, self._changes = committing

    def _check_rename(self, place: Place, entry: object) -> None:
        if place.name == LATEST:
            self.oracle.named(self._actor, LATEST)
            self.oracle.pointed(parse_step(str(entry)) or 0)
        elif place.name == WITHDRAWN:
            self.oracle.named(self._actor, str(place))
            self.oracle.withdrawn(parse_step(place.parent.name) or 0)
        elif parse_step(place.name) is not None:
            self.oracle.named(self._actor, str(place))
