"""Paths of the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.exit_codes import UsageError

RUN_LINE = "run directory: "
"""What a line of a job's output begins with that names its run's directory."""


class _Below:
    """A path below a run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths below `<run.dir>/<run.name>/`. Nothing is created by naming it."""

    path: Path

    config = _Below("config.toml")
    """The configuration as resolved by the first attempt."""
    accepted = _Below("accepted.toml")
    """The last configuration that a supervisor has checked: its ranks read this one."""
    identity = _Below("identity.json")
    """What the run is: its command, its program and its facts."""
    program = _Below("program")
    """Copies of the program's files that git tracks, one for each content; for the owner."""

    def changed_config(self, attempt: int) -> Path:
        """The configuration of an attempt, where it differs from the first one's."""
        return self.attempt(attempt) / "config.toml"

    ledger = _Below("ledger.jsonl")
    """Append-only events, one JSON object a line."""
    finished = _Below("finished.json")
    """Exists if a loop of the user's own was finished before its last step: after which."""
    gave_up = _Below("GAVE_UP")
    """Exists if kempner gave up: why, and what to do."""
    supervisors = _Below("supervisors")
    """One numbered file per supervisor; the last one owns the run."""
    invitation = _Below("invitation.json")
    """How nodes of other jobs join the run; holds a secret, so for its owner alone."""
    trackers = _Below("trackers.json")
    """By which ids Weights & Biases, MLflow and Comet know a program of the user's own."""
    submissions = _Below("submissions")
    """One numbered folder per `kempner.submit`: batch script, printed output, job id."""
    metrics = _Below("metrics.jsonl")
    """One JSON object per logged step or evaluation."""
    attempts = _Below("attempts")
    """One numbered folder per attempt, and CURRENT, which names the live one."""
    checkpoints = _Below("checkpoints")
    """The default of `checkpoint.dir`."""
    compiled = _Below("compiled")
    """What torch.compile has made, for the next start."""
    exports = _Below("exports")
    """What `kempner metrics` keeps: how far it is, and the files of TensorBoard and W&B."""
    profiles = _Below("profiles")
    """Traces of steps, as `[profiling]` or `kempner profile` asked for."""

    def samples(self, rank: int) -> Path:
        """The ids that a rank consumed, one JSON line a step."""
        return self.path / "samples" / f"rank-{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        """Logs and evidence of one attempt."""
        return self.attempts / str(number)

    def log(self, attempt: int, rank: int) -> Path:
        """A rank's structured log, one JSON object a line."""
        return self.attempt(attempt) / f"rank-{rank:05d}.jsonl"

    def output(self, attempt: int, rank: int) -> Path:
        """What a rank printed: the first of it and the last."""
        return self.attempt(attempt) / f"rank-{rank:05d}.out"

    def stacks(self, attempt: int, rank: int) -> Path:
        """The stacks of a rank's threads, as often as they were asked for."""
        return self.attempt(attempt) / f"rank-{rank:05d}.stacks"

    def flight(self, attempt: int, rank: int) -> Path:
        """What torch's flight recorder has of a rank's collectives, for `torchfrtrace`."""
        return self.attempt(attempt) / f"flight-{rank}"

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """How far a rank is whose program does not import kempner, as it says itself."""
        return self.attempt(attempt) / f"rank-{rank:05d}.heartbeat"

    def claim(self, attempt: int) -> Path:
        """Made by the rank that puts the job back into the queue when the supervisor is gone."""
        return self.attempt(attempt) / "requeued-by"

    def ranks(self, attempt: int) -> Path:
        """Step and phase of every rank, as last heard by the supervisor."""
        return self.attempt(attempt) / "ranks.json"

    def supervisor_log(self, attempt: int) -> Path:
        """The supervisor's structured log, one JSON object a line."""
        return self.attempt(attempt) / "supervisor.jsonl"


def cannot_keep(run: RunDirectory, error: OSError) -> UsageError:
    """The error of a start whose run directory cannot be written."""
    return UsageError(
        f"the run's directory {run.path} cannot be written ({error.strerror}); "
        "set run.dir to a writable folder"
    )


def name_of_command(command: Sequence[str], otherwise: str) -> str:
    """What to call the run of a command: as its script. Raises `UsageError` if it has none:
    `otherwise` is how to name it."""
    for word in command:
        if word.endswith(".py"):
            return Path(word).stem
    raise UsageError(f"give the run a name: {otherwise}")
