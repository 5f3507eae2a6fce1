"""Keeps PyTorch training runs alive on shared Slurm clusters.

The public names are imported on first use, so `import kempner` stays fast and needs no torch:

    from kempner import CheckpointManager, ShutdownHandler, survive

`survive` makes a training loop of your own stop, save and resume; the two classes are its parts.
`ResumableBatchSampler`, `ResumableSampler` and `ResumableDataLoader` resume at the right sample.
`submit` starts a run, on a Slurm cluster or here, and returns its `Job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "Job",
    "ResumableBatchSampler",
    "ResumableDataLoader",
    "ResumableSampler",
    "ShutdownHandler",
    "__version__",
    "submit",
    "survive",
]

if TYPE_CHECKING:  # for type checkers and editors; __getattr__ imports them at run time
    from kempner.checkpoint.manager import CheckpointManager
    from kempner.data.serve.sampler import (
        ResumableBatchSampler,
        ResumableDataLoader,
        ResumableSampler,
    )
    from kempner.jobs.job import Job
    from kempner.jobs.submit import submit
    from kempner.training.rank_link.shutdown import ShutdownHandler
    from kempner.training.survive import survive
else:
    _HOMES = {
        "CheckpointManager": "kempner.checkpoint.manager",
        "Job": "kempner.jobs.job",
        "ResumableBatchSampler": "kempner.data.serve.sampler",
        "ResumableDataLoader": "kempner.data.serve.sampler",
        "ResumableSampler": "kempner.data.serve.sampler",
        "ShutdownHandler": "kempner.training.rank_link.shutdown",
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
