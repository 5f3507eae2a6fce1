"""One run of Weights & Biases, MLflow or Comet for all starts of a user's own program.

The supervisor keeps an id with the run, and each rank finds it in the variables that these
libraries read. Variables that are already set, and what the program sets itself, stay. Rank 0 has
the id; each other rank, which would write into the same run at once, has its own. A program that
runs several loops in one process has an id for each. An MLflow run must exist before it can be
resumed: rank 0 notes the one that is active.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from kempner.run.output.logs import logger

TRACKERS = "KEMPNER_TRACKERS"
"""The variable with the `Trackers` of the run in JSON."""

_LOOP = "KEMPNER_TRACKERS_LOOP"
_RANK = "KEMPNER_TRACKERS_RANK"


@dataclass(frozen=True)
class Trackers:
    """The `id` from which all others are derived, and the MLflow run of each loop, by its
    number."""

    id: str
    mlflow_runs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `text`. Raises `ValueError` if it is not of this form."""
        content = json.loads(text)
        try:
            return cls(
                str(content["id"]), {str(k): str(v) for k, v in content["mlflow_runs"].items()}
            )
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"it has no ids ({error})") from None

    @property
    def text(self) -> str:
        """JSON, for a file or a variable."""
        return json.dumps(asdict(self))

    def ids(self, rank: int, loop: int) -> dict[str, dict[str, str]]:
        """The variables of each library, under the one whose presence means that the user has set a
        run."""
        name = self.id + (f"-{loop}" if loop > 1 else "") + (f"-rank{rank}" if rank else "")
        key = hashlib.sha256(name.encode()).hexdigest()[:32]  # Comet takes 32 to 50 characters
        found = {
            "WANDB_RUN_ID": {"WANDB_RUN_ID": name, "WANDB_RESUME": "allow"},
            "COMET_EXPERIMENT_KEY": {
                "COMET_EXPERIMENT_KEY": key,
                "COMET_RESUME_STRATEGY": "get_or_create",
            },
        }
        if (run := self.mlflow_runs.get(str(loop))) is not None and not rank:
            found["MLFLOW_RUN_ID"] = {"MLFLOW_RUN_ID": run}
        return found

    def variables(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """What to add to the environment of a new rank."""
        ids = self.ids(rank, 1).items()
        added = {k: v for name, each in ids if name not in environ for k, v in each.items()}
        return {**added, _LOOP: "1", _RANK: str(rank)}


def open_trackers(path: Path) -> str:
    """The text of this file, created if missing; empty if storage fails: then the program's
    libraries choose their runs."""
    try:
        if path.exists():
            return Trackers.parse(path.read_text()).text
        made = Trackers(secrets.token_hex(8)).text
        _write(path, made)
        return made
    except (OSError, ValueError) as error:
        logger().warning("trackers may show a new run", reason=str(error))
        return ""


def begin_next_loop(environ: MutableMapping[str, str] = os.environ) -> None:
    """After a completed loop, make the next loop of this process another run."""
    if TRACKERS not in environ or _LOOP not in environ:
        return
    trackers, rank = Trackers.parse(environ[TRACKERS]), int(environ[_RANK])
    loop = int(environ[_LOOP])
    for name, old in trackers.ids(rank, loop).items():
        new = trackers.ids(rank, loop + 1).get(name, {})
        if environ.get(name, old[name]) == old[name]:  # MLflow removes its own
            for variable in old:
                environ.pop(variable, None)
            environ.update(new)
    environ[_LOOP] = str(loop + 1)


def note_mlflow_run(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Record the MLflow run that is active in this thread, if any, for the next start."""
    mlflow = sys.modules.get("mlflow")
    if TRACKERS not in environ or _LOOP not in environ or mlflow is None:
        return
    active = getattr(mlflow, "active_run", lambda: None)()
    if active is None:
        return
    try:
        kept = Trackers.parse(path.read_text())
        run, loop = str(active.info.run_id), environ[_LOOP]
        if kept.mlflow_runs.get(loop) != run:
            runs = {**kept.mlflow_runs, loop: run}
            _write(path, replace(kept, mlflow_runs=runs).text)
    except (OSError, ValueError) as error:
        logger().info("the MLflow run is not noted", reason=str(error))


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
