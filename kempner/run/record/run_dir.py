"""Paths of the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.exit_codes import UsageError

RUN_LINE = "run directory: "
"""What a line of a job's output begins with that names its run's directory."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths below `<run.dir>/<run.name>/`. Nothing is created by naming it."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as resolved by the first attempt."""
        return self.path / "config.toml"

    @property
    def identity(self) -> Path:
        """What the run is: its command, its program and its facts."""
        return self.path / "identity.json"

    @property
    def program(self) -> Path:
        """Copies of the program's files that git tracks, one for each content; for the owner."""
        return self.path / "program"

    def changed_config(self, attempt: int) -> Path:
        """The configuration of an attempt, where it differs from the first one's."""
        return self.attempt(attempt) / "config.toml"

    @property
    def ledger(self) -> Path:
        """Append-only events, one JSON object a line."""
        return self.path / "ledger.jsonl"

    @property
    def finished(self) -> Path:
        """Exists if a loop of the user's own was finished before its last step: after which."""
        return self.path / "finished.json"

    @property
    def gave_up(self) -> Path:
        """Exists if kempner gave up: why, and what to do."""
        return self.path / "GAVE_UP"

    @property
    def supervisors(self) -> Path:
        """One numbered file per supervisor; the last one owns the run."""
        return self.path / "supervisors"

    @property
    def invitation(self) -> Path:
        """How nodes of other jobs join the run; holds a secret, so for its owner alone."""
        return self.path / "invitation.json"

    @property
    def trackers(self) -> Path:
        """By which ids Weights & Biases, MLflow and Comet know a program of the user's own."""
        return self.path / "trackers.json"

    @property
    def submissions(self) -> Path:
        """One numbered folder per `kempner.submit`: batch script, printed output, job id."""
        return self.path / "submissions"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """One numbered folder per attempt, and CURRENT, which names the live one."""
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        """The default of `checkpoint.dir`."""
        return self.path / "checkpoints"

    @property
    def compiled(self) -> Path:
        """What torch.compile has made, for the next start."""
        return self.path / "compiled"

    @property
    def exports(self) -> Path:
        """What `kempner metrics` keeps: how far it is, and the files of TensorBoard and W&B."""
        return self.path / "exports"

    @property
    def profiles(self) -> Path:
        """Traces of steps, as `[profiling]` or `kempner profile` asked for."""
        return self.path / "profiles"

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
        """What a rank other than the first printed."""
        return self.attempt(attempt) / f"rank-{rank:05d}.out"

    def stacks(self, attempt: int, rank: int) -> Path:
        """The stacks of a rank's threads, as often as they were asked for."""
        return self.attempt(attempt) / f"rank-{rank:05d}.stacks"

    def messages(self, attempt: int, rank: int | None) -> Path:
        """What a rank (None: the supervisor) has to say where no connection is possible."""
        name = "supervisor" if rank is None else f"rank-{rank:05d}"
        return self.attempt(attempt) / f"{name}.messages"

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


def name_of_command(command: Sequence[str], otherwise: str) -> str:
    """What to call the run of a command: as its script.

    Raises `UsageError` if it has none: `otherwise` is how to name it.
    """
    for word in command:
        if word.endswith(".py"):
            return Path(word).stem
    raise UsageError(f"give the run a name: {otherwise}")
