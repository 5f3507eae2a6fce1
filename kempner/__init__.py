"""Keeps PyTorch training runs alive on shared Slurm clusters.

The public names are imported on first use, so `import kempner` stays fast and needs no torch:

    from kempner import CheckpointManager, ShutdownHandler, survive

`survive` makes a training loop of your own stop, save and resume; with the two classes the loop
itself asks when to stop, and saves; `Slots` makes its steps the same bits on any number of ranks.
`ResumableBatchSampler`, `ResumableSampler` and `ResumableDataLoader` resume at the right sample.
`submit` starts a run, on a Slurm cluster or here, and returns its `Job`. What a user can correct is
a `RunError`, or its `UsageError`, with an `ExitCode`.
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
    "Slots",
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
    from kempner.training.slots import Slots
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
        "Slots": "kempner.training.slots",
        "UsageError": "kempner.run.process.exit_codes",
        "submit": "kempner.jobs.submit",
        "survive": "kempner.training.survive",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import_apart(_HOMES[name]), name)
        return value

    def _import_apart(module: str) -> object:
        """Import a module for which, and for all that it imports, Python's own modules are meant by
        their names: the folder of the script may have a `statistics.py`, which stays the script's.
        """
        import os
        import sys
        from importlib import import_module
        from types import ModuleType

        head = os.path.realpath(sys.path[0] if sys.path else ".")
        beside = os.listdir(head) if os.path.isdir(head) else []  # noqa: PTH208, PTH112 - light
        names = {file.removesuffix(".py") for file in beside} & sys.stdlib_module_names
        if not names:
            return import_module(module)

        def named_so() -> dict[str, ModuleType]:
            return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}

        def is_of_script(found: ModuleType) -> bool:
            file = getattr(found, "__file__", None) or "/"
            return os.path.realpath(file).startswith(head + os.sep)

        before, path = set(sys.modules), list(sys.path)
        of_script = {name: found for name, found in named_so().items() if is_of_script(found)}
        for known in of_script:
            del sys.modules[known]
        sys.path[:] = [*path[1:], path[0]]
        try:
            return import_module(module)
        finally:
            sys.path[:] = path
            for new in named_so().keys() - (before - of_script.keys()):
                del sys.modules[new]
            sys.modules.update(of_script)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
