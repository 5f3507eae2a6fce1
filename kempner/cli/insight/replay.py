"""`kempner replay`: computes steps of a run again, and says whether the bits are the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.store.retention import reading
from kempner.cli.insight.target import RUN, RUN_METAVAR, run_of
from kempner.cli.progress import busy
from kempner.insight.replay import (
    Line,
    RecordedRun,
    ReplayPlan,
    compare_steps,
    copy_trace,
    first_part,
    logged_steps,
    plan_replay,
    read_recorded,
    replay_config,
)
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode, RunError, cannot_read, cannot_write
from kempner.run.record.recorded_config import checkpoint_folder
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)


@app.command()
def replay(
    run_dir: Annotated[str, typer.Argument(metavar=RUN_METAVAR, help=RUN)],
    step: Annotated[int, typer.Option(min=1, help="The first step to compare.")],
    to: Annotated[
        int | None, typer.Option(min=1, help="The last one; by default --step itself.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this machine; by default as many as the run had."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the replay's folder, in replays/ of RUN_DIR.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write what each module computes to this file, as lines of JSON."),
    ] = None,
) -> int:
    """Compute steps of a run again from the checkpoint before them; exit 1 if a bit differs.

    Compares loss, gradient norm, learning rate and fingerprint of each step; and weights and
    optimizer, if the run has a checkpoint of the last one. The run is only read, and may go on. The
    same command continues after an interruption. Without --ranks a Slurm job's nodes compute.
    """
    run, last = run_of(run_dir), step if to is None else to
    theirs = CheckpointFolder(checkpoint_folder(run))
    recorded, plan = _plan(run, theirs, (step, last), ranks, trace)
    place = RunDirectory(run.replays / plan.name)
    code = _compute(plan, place, theirs, on_this_machine=ranks is not None)
    if code != ExitCode.COMPLETED:
        typer.echo("kempner: the replay has stopped; the same command continues it", err=True)
        return code if code > 0 else ExitCode.CRASHED
    same = [
        _compare_steps(run, recorded.lines, place, step),
        _compare_states(theirs, CheckpointFolder(place.checkpoints), last),
        trace is None or _hand_over(plan, place, trace),
    ]
    if not keep:
        shutil.rmtree(place.path, ignore_errors=True)
    return ExitCode.COMPLETED if all(same) else ExitCode.CRASHED


def _plan(
    run: RunDirectory,
    theirs: CheckpointFolder,
    steps: tuple[int, int],
    ranks: int | None,
    trace: Path | None,
) -> tuple[RecordedRun, ReplayPlan]:
    """What to compare with, and what to compute, which is said. Raises `RunError` now if the trace
    could not be written later."""
    try:
        recorded = read_recorded(run, theirs.committed(), *steps)
    except OSError as error:
        raise cannot_read(run.path, error) from error
    plan = plan_replay(recorded, *steps, ranks)
    typer.echo(plan.sentence)
    if trace is None:
        return recorded, plan
    try:
        trace.open("ab").close()
    except OSError as error:
        raise cannot_write(trace, error) from error
    return recorded, replace(plan, traced=True)


def _hand_over(plan: ReplayPlan, place: RunDirectory, trace: Path) -> bool:
    """Write the trace, and say what it has; whether that is all."""
    documents = _documents(plan)
    try:
        steps = copy_trace(place.path, trace, documents)
    except OSError as error:
        raise cannot_write(trace, error) from error
    missing = sorted({*range(plan.first, plan.last + 1)} - {*steps})
    lacks = f", without step {missing[0]}, which could not be written" if missing else ""
    typer.echo(f"trace: {trace}, {count(len(steps), 'step')}{lacks}")
    return not missing


def _documents(plan: ReplayPlan) -> Callable[[int], list[int]] | None:
    """Finds the documents of a sample; None, which is said, where the data cannot be seen from this
    machine."""
    from kempner.data.files.token_file import Corpus

    length = plan.config["train"]["seq_len"]
    try:
        corpus = Corpus.open(plan.config["data"]["dataset_path"])
    except RunError as error:
        typer.echo(f"trace: without documents: {error}")
        return None
    return lambda sample: corpus.documents(sample * length, length)


def _compute(
    plan: ReplayPlan, place: RunDirectory, theirs: CheckpointFolder, on_this_machine: bool
) -> int:
    """Run the replay; its exit code."""
    command = [sys.executable, "-m", "kempner", "supervise", str(place.path / "replay.toml")]
    if on_this_machine or "SLURM_JOB_ID" not in os.environ:
        command += ["--launcher", "local", "--nproc", str(plan.ranks)]
    environ = {name: value for name, value in os.environ.items() if name != "KEMPNER_FAULTS"}
    with nullcontext() if plan.start is None else reading(theirs, plan.start):
        try:
            _prepare(plan, place, theirs)
        except OSError as error:
            raise cannot_write(place.path, error) from error
        with subprocess.Popen(command, env=environ) as supervisor:
            signal.signal(signal.SIGTERM, lambda number, _: supervisor.send_signal(number))
            signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to both
            return supervisor.wait()


def _prepare(plan: ReplayPlan, place: RunDirectory, theirs: CheckpointFolder) -> None:
    """Lay the checkpoint to begin with, and the configuration, where the replay looks for them."""
    here = CheckpointFolder(place.checkpoints)
    here.path.mkdir(parents=True, exist_ok=True)
    (place.path / "replay.toml").write_text(tomli_w.dumps(replay_config(plan, place.path)))
    if plan.start is None:
        return
    base = read(theirs.step(plan.start)).identity.base
    for step in {plan.start, plan.start if base is None else base.step}:
        target, source = here.step(step), theirs.step(step).resolve()
        if target.exists():
            continue
        try:
            target.symlink_to(source)
        except OSError:  # a file system without links
            shutil.copytree(source, target)
    if here.latest() is None:
        here.point_latest(plan.start, "replay")


def _compare_steps(
    run: RunDirectory, theirs: Mapping[int, Line], place: RunDirectory, first: int
) -> bool:
    """Say which step is the first that differs, if any does, and which of its parts."""
    compared = compare_steps(theirs, logged_steps(place.metrics, first - 1, max(theirs)))
    differing = [one for one in compared if one.differing]
    same = f"{count(len(compared), 'step')}: equal to the bit"
    typer.echo(differing[0].between("in the run", "here") if differing else same)
    return _compare_parts(run, place, range(first, max(theirs) + 1)) and not differing


def _compare_parts(run: RunDirectory, place: RunDirectory, steps: range) -> bool:
    """Say which part of a step differs first, if any is known that does."""
    try:
        found = first_part(run.parts, place.parts, steps)
    except OSError as error:
        raise cannot_read(run.parts, error) from error
    if found is not None:
        typer.echo(found)
    return found is None


def _compare_states(theirs: CheckpointFolder, here: CheckpointFolder, step: int) -> bool:
    """Say whether the checkpoints of `step` are the same; true, too, if there is only one."""
    if step not in theirs.committed():
        typer.echo(f"weights and optimizer: not compared, the run has no checkpoint of step {step}")
        return True
    with busy("importing torch"):
        from kempner.checkpoint.compare import open_kempner, pairs
    with reading(theirs, step):
        run, again = open_kempner(theirs.step(step)), open_kempner(here.step(step))
        found = list(pairs(run, again, lambda read: None))
    differing = [pair.name for pair in found if not pair.equal]
    tensors = count(len(found), "tensor")
    verdict = f"equal to the bit, {tensors}"
    if differing:
        verdict = f"{len(differing)} of {tensors} differ, first {differing[0]}"
    typer.echo(f"weights and optimizer: {verdict}")
    return not differing
