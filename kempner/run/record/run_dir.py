"""Paths of the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.exit_codes import UsageError

RUN_LINE = "run directory: "
"""The beginning of the line in a job's output that names the run's directory."""


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
    """The resolved configuration of the first attempt."""
    accepted = _Below("accepted.toml")
    """The last configuration that a supervisor has checked, which its ranks read."""
    identity = _Below("identity.json")
    """What the run is: its command, its program and its facts."""
    program = _Below("program")
    """Copies of the program's files that git tracks, one for each content; readable by the
    owner."""

    def changed_config(self, attempt: int) -> Path:
        """The configuration of an attempt, if it differs from the first one's."""
        return self.attempt(attempt) / "config.toml"

    ledger = _Below("ledger.jsonl")
    """Append-only events, one JSON object a line."""
    finished = _Below("finished.json")
    """Exists if a user's own loop finished before its last step; holds the step."""
    gave_up = _Below("GAVE_UP")
    """Exists if kempner gave up; says why, and what to do."""
    supervisors = _Below("supervisors")
    """One numbered file per supervisor; the last one owns the run."""
    invitation = _Below("invitation.json")
    """How nodes of other jobs join the run; holds a secret, so only its owner can read it."""
    trackers = _Below("trackers.json")
    """The ids of the run in Weights & Biases, MLflow and Comet."""
    submissions = _Below("submissions")
    """One numbered folder per `kempner.submit`: batch script, printed output, job id."""
    metrics = _Below("metrics.jsonl")
    """One JSON object per logged step or evaluation."""
    parts = _Below("parts.jsonl")
    """One JSON object per step with fingerprints of its parts, if any are asked for."""
    attempts = _Below("attempts")
    """One numbered folder per attempt, and CURRENT, which names the live one."""
    checkpoints = _Below("checkpoints")
    """The default of `checkpoint.dir`."""
    compiled = _Below("compiled")
    """torch.compile's cache, for the next start."""
    exports = _Below("exports")
    """State of `kempner metrics`: its progress, and the files of TensorBoard and W&B."""
    replays = _Below("replays")
    """Runs of `kempner replay`, which repeat steps of this one."""
    profiles = _Below("profiles")
    """Traces of steps that `[profiling]` or `kempner profile` requested."""

    def samples(self, rank: int) -> Path:
        """The samples that a rank consumed, as positions in the sample order; one JSON line a
        step."""
        return self.path / "samples" / f"rank-{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        """Logs and evidence of one attempt."""
        return self.attempts / str(number)

    def log(self, attempt: int, rank: int) -> Path:
        """A rank's structured log, one JSON object a line."""
        return self.attempt(attempt) / f"rank-{rank:05d}.jsonl"

    def output(self, attempt: int, rank: int) -> Path:
        """A rank's printed output: its beginning and its end."""
        return self.attempt(attempt) / f"rank-{rank:05d}.out"

    def stacks(self, attempt: int, rank: int) -> Path:
        """The stacks of a rank's threads, appended at each request."""
        return self.attempt(attempt) / f"rank-{rank:05d}.stacks"

    def flight(self, attempt: int, rank: int) -> Path:
        """The content of torch's flight recorder in a rank, for `torchfrtrace`."""
        return self.attempt(attempt) / f"flight-{rank}"

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """The progress that a program without kempner reports for a rank."""
        return self.attempt(attempt) / f"rank-{rank:05d}.heartbeat"

    def claim(self, attempt: int) -> Path:
        """Created by the rank that requeues the job when the supervisor is gone."""
        return self.attempt(attempt) / "requeued-by"

    def ranks(self, attempt: int) -> Path:
        """The last step and phase that the supervisor has heard of every rank."""
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
    """The name of a command's run: that of its script. Raises `UsageError` if it has none;
    `otherwise` says how to give a name."""
    for word in command:
        if word.endswith(".py"):
            return Path(word).stem
    raise UsageError(f"give the run a name: {otherwise}")
