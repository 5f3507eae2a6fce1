"""`kempner train`: one rank."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from kempner.cli.config import TAKES_OVERRIDES, ConfigFile
from kempner.cli.progress import busy
from kempner.cli.usage import overrides
from kempner.config.loading import load
from kempner.config.resilience import refuse_absent_ranks
from kempner.config.sections import Config
from kempner.model.spec.mesh import resolve_mesh
from kempner.run.output.console import expect_a_line_for_now, say
from kempner.run.output.logs import logger
from kempner.run.process.retry import storage_waits
from kempner.run.record.run_dir import RUN_LINE, RunDirectory
from kempner.training.rank_link.rank_link import RankLink, open_rank_link
from kempner.training.rank_link.shutdown import StopListener

app = typer.Typer(rich_markup_mode=None)


@app.command(context_settings=TAKES_OVERRIDES)
def train(context: typer.Context, file: ConfigFile) -> None:
    """Train as one rank: CONFIG, then --section.key=value.

    Its world comes from torchrun, a Slurm step or `kempner supervise`; otherwise it is one process.
    Started again, the run continues from its newest checkpoint.
    """
    shutdown = StopListener()
    shutdown.install()
    config = load(file, overrides(context, file))
    rank_link = open_rank_link(config, shutdown)
    if rank_link.launch is not None:
        expect_a_line_for_now()
    else:  # under a supervisor there may be fewer ranks, after a lost node
        refuse_absent_ranks(config.resilience.faults, rank_link.world.size)
        resolve_mesh(config, rank_link.world.size)
    if _is_alone(rank_link):
        storage_waits().configure(config.resilience.patience, shutdown.should_shutdown)
        _check(config, rank_link.run)
    with busy("importing torch") if _is_alone(rank_link) else nullcontext():
        from kempner.training.main import main

    main(config, rank_link, shutdown)


def _is_alone(rank_link: RankLink) -> bool:
    return rank_link.launch is None and rank_link.world.size == 1


def _check(config: Config, run: RunDirectory) -> None:
    """The supervisor's checks, for a rank without one, before torch is imported."""
    from kempner.supervisor.readiness import check_ready, check_run_directory

    say(f"{RUN_LINE}{run.path}")
    check_run_directory(run)
    for warning in check_ready(config, run).warnings:
        logger().warning(warning)
