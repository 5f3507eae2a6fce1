"""Keeps PyTorch training runs alive on shared Slurm clusters.

The public names are imported on first use, so `import kempner` stays fast and needs no torch:

    from kempner import CheckpointManager, ShutdownHandler, survive

`survive` makes a training loop of your own stop, save and resume; with the two classes the loop
itself asks when to stop, and saves. `ResumableBatchSampler`, `ResumableSampler` and
`ResumableDataLoader` resume at the right sample. `submit` starts a run, on a Slurm cluster or here,
and returns its `Job`. What a user can correct is a `RunError`, or its `UsageError`, with an
`ExitCode`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "ExitCode",
    "Job",
    "ResumableBatchSampler",
    "ResumableDataLoader",
    "ResumableSampler",
    "RunError",
    "ShutdownHandler",
    "UsageError",
    "__version__",
    "submit",
    "survive",
]

if TYPE_CHECKING:  # for type checkers and editors; __getattr__ imports them at run time
    from kempner.data.serve.sampler import (
        ResumableBatchSampler,
        ResumableDataLoader,
        ResumableSampler,
    )
    from kempner.jobs.job import Job
    from kempner.jobs.submit import submit
    from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
    from kempner.training.by_hand import CheckpointManager, ShutdownHandler
    from kempner.training.survive import survive
else:
    _HOMES = {
        "CheckpointManager": "kempner.training.by_hand",
        "ExitCode": "kempner.run.process.exit_codes",
        "Job": "kempner.jobs.job",
        "ResumableBatchSampler": "kempner.data.serve.sampler",
        "ResumableDataLoader": "kempner.data.serve.sampler",
        "ResumableSampler": "kempner.data.serve.sampler",
        "RunError": "kempner.run.process.exit_codes",
        "ShutdownHandler": "kempner.training.by_hand",
        "UsageError": "kempner.run.process.exit_codes",
        "submit": "kempner.jobs.submit",
        "survive": "kempner.training.survive",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
