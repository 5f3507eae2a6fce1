"""`kempner doctor`: everything that a run needs, checked before it starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kempner.cli.config import TAKES_OVERRIDES, ConfigFile
from kempner.cli.progress import busy
from kempner.cli.usage import overrides
from kempner.config.errors import ConfigError
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.insight.doctor.checks.fit import PlannedWorld
from kempner.insight.doctor.examine import Examination, Supervisor, examine
from kempner.insight.doctor.facts.slurm import JobPlan, job_plan, read_plan, there_is_slurm
from kempner.insight.doctor.finding import Finding, Level, fail, finding, lines, show, worst
from kempner.run.process.exit_codes import ExitCode, UsageError, cannot_read
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import Durations, SaveSeconds
from kempner.supervisor.policy.stop import exit_margin, stop_lead
from kempner.supervisor.readiness import check_ready, check_run_directory
from kempner.supervisor.slurm.setup import find_job, inspect_job

app = typer.Typer(rich_markup_mode=None)

USUAL_SCRIPT = Path("scripts/slurm/multinode.sh")


InAllocationOption = Annotated[
    bool, typer.Option("--allocation", help="In a Slurm job: check all of its nodes at once.")
]
JobidOption = Annotated[
    str | None,
    typer.Option(help="With --allocation: another job than the one this command runs in."),
]
ScriptOption = Annotated[
    Path | None,
    typer.Option(
        help="The batch script that will be submitted; by default scripts/slurm/multinode.sh, "
        "where there is Slurm."
    ),
]
NprocOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this machine, where there is no script.")
]


@app.command(context_settings=TAKES_OVERRIDES)
def doctor(
    context: typer.Context,
    file: ConfigFile,
    in_allocation: InAllocationOption = False,
    jobid: JobidOption = None,
    script: ScriptOption = None,
    nproc: NprocOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> int:
    """Check all that a run needs before it starts: CONFIG, then --section.key=value.

    Ranks and GPUs, data, storage, network, limits, software, and whether a stop fits between
    Slurm's warning and the job's end. Nothing is left behind, and a run that is going on is not
    disturbed. Exits with 2 if something failed.
    """
    if jobid is not None and not in_allocation:
        raise UsageError("--jobid names a Slurm allocation: use it with --allocation")
    try:
        config = load(file, overrides(context, file))
    except ConfigError as error:
        return _tell([finding("configuration", fail(str(error)))], as_json)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    if in_allocation:
        examination = _in_allocation(config, run, script, jobid)
    else:
        examination = _before_launch(config, run, script, nproc)

    def ready() -> None:
        check_run_directory(run)
        check_ready(config, run)

    def lead(save: float) -> float:
        """The lead in a long job, without the time of steps."""
        durations = Durations((SaveSeconds(0.0, save, 0.0),))
        return stop_lead(durations, 0.0, None, exit_margin((), None))

    supervisor = Supervisor(ready, lead)
    with _tidy_when_ended():
        return _tell(examine(examination, supervisor, looking=busy), as_json, examination.nodes)


@contextmanager
def _tidy_when_ended() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that files written for other nodes are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_allocation(
    config: Config, run: RunDirectory, script: Path | None, jobid: str | None
) -> Examination:
    job = find_job(os.environ, jobid)
    plan = job_plan(job) if script is None else _plan(script)
    torchrun = config.slurm.launcher == "torchrun" or (plan is not None and plan.nodes.torchrun)
    allocation, _ = inspect_job(
        job, os.environ, config, given=jobid is not None, per_task=not torchrun
    )
    gpus, source = allocation.gpus_per_node or None, f"job {allocation.job}"
    nodes, tasks = len(allocation.nodes), allocation.tasks_per_node
    world = PlannedWorld(nodes, tasks, gpus, source, in_job=True)
    return Examination(config, run, world, plan, allocation)


def _before_launch(
    config: Config, run: RunDirectory, script: Path | None, nproc: int | None
) -> Examination:
    if script is None and nproc is None and shutil.which("sbatch") and USUAL_SCRIPT.is_file():
        with busy("asking Slurm"):
            script = USUAL_SCRIPT if there_is_slurm() else None
    plan = None if script is None else _plan(script)
    if plan is None:
        source = "--nproc" if nproc else "one process"
        return Examination(config, run, PlannedWorld(1, nproc or 1, None, source))
    section, asked = config.slurm, plan.nodes
    gpus = asked.gpus if section.gpus_per_node is None else section.gpus_per_node
    asked = replace(asked, gpus=gpus, torchrun=asked.torchrun or section.launcher == "torchrun")
    per_node = section.procs or asked.ranks or gpus or 1
    world = PlannedWorld(section.hosts or asked.count or 1, per_node, gpus, plan.source)
    return Examination(config, run, world, plan)


def _plan(script: Path) -> JobPlan:
    try:
        return read_plan(script)
    except OSError as error:
        raise cannot_read(script, error) from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _tell(findings: Iterable[Finding], as_json: bool, asked: Collection[str] = ()) -> int:
    reported = list[Finding]()

    def keeping() -> Iterator[Finding]:
        for each in findings:
            reported.append(each)
            yield each

    if as_json:
        plain = [one.to_json() for one in keeping()]
        typer.echo(json.dumps({"level": worst(reported), "findings": plain}, indent=2))
    elif sys.stdout.isatty():
        show(keeping(), asked, Console())
    else:
        for line in lines(keeping(), asked):
            typer.echo(line)
    return ExitCode.USAGE if worst(reported) is Level.FAIL else ExitCode.COMPLETED
