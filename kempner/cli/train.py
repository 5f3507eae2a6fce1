"""`kempner train`: one rank."""

from __future__ import annotations

import typer

from kempner.cli.config import TAKES_OVERRIDES, ConfigFile
from kempner.cli.usage.words import overrides
from kempner.config.fault_spec import refuse_absent_ranks
from kempner.config.loading import load
from kempner.run.output import logs
from kempner.run.record.run_dir import refuse_unusable
from kempner.training.rank_link.rank_link import open_rank_link
from kempner.training.rank_link.shutdown import ShutdownHandler


def register(app: typer.Typer) -> None:
    """Adds `train` to `app`."""
    app.command(context_settings=TAKES_OVERRIDES)(train)


def train(context: typer.Context, file: ConfigFile) -> None:
    """Train as one rank: CONFIG, then --section.key=value.

    Its world comes from torchrun, a Slurm step or `kempner supervise`; otherwise it is one process.
    Started again, the run continues from its newest checkpoint.
    """
    shutdown = ShutdownHandler()
    shutdown.install()
    logs.configure()
    config = load(file, overrides(context, file))
    rank_link = open_rank_link(config, shutdown)
    refuse_unusable(rank_link.run)
    if rank_link.launch is None:  # after a node was lost, a supervisor may start fewer
        refuse_absent_ranks(config.resilience.faults, rank_link.world.size)
    from kempner.training.main import main

    main(config, rank_link, shutdown)
