"""`kempner compare`: the first step, parameter and operation in which two runs differ; or the
differences between two checkpoints, or between two traces of a step."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.store.retention import reading
from kempner.cli.checkpoint.compare import compare_checkpoints
from kempner.cli.insight.replay import replay
from kempner.cli.progress import busy
from kempner.insight.compare import FirstOperation, first_operation, first_parameter, first_step
from kempner.insight.replay import (
    Line,
    ReplayedStep,
    compare_steps,
    computing,
    first_part,
    logged_steps,
    traced_steps,
)
from kempner.run.output.units import count
from kempner.run.process.exit_codes import DataError, ExitCode, RunError, UsageError, cannot_read
from kempner.run.record.recorded_config import checkpoint_folder, differences, recorded_config
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)

_HELP = (
    "A run; or a checkpoint: its folder, a folder of steps (its `latest`), a folder of "
    "torch.distributed.checkpoint, or one with safetensors; or a file of `kempner replay --trace`."
)
_OTHER = "The other one. A run beside a checkpoint stands for its `latest`."


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help=_OTHER)],
    quick: Annotated[
        bool, typer.Option("--quick", help="Of two runs: compute no step again.")
    ] = False,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Of checkpoints: leave out the optimizer's state.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Of checkpoints: print each tensor's result as JSON.")
    ] = False,
) -> ExitCode:
    """Find where two runs, or two checkpoints, differ; exit 1 if they do.

    Of two runs the first step whose loss, norm or fingerprint differs is computed again in both
    configurations, with a trace of what each module computes: the first parameter and the first
    operation that differ are named.

    Two checkpoints are compared tensor by tensor: values of two dtypes after rounding to the
    narrower one, and against safetensors only the model.
    """
    runs = RunDirectory(a), RunDirectory(b)
    traces, logged = a.is_file() and b.is_file(), all(run.metrics.is_file() for run in runs)
    if not traces and not logged:
        return compare_checkpoints(a, b, model_only, as_json)
    if model_only or as_json:
        latest = " and ".join(str(checkpoint_folder(run)) for run in runs)
        raise UsageError(
            f"{'--json' if as_json else '--model-only'} is for two checkpoints"
            f"{f'; the newest ones of these runs are compared by naming {latest}' * logged}"
        )
    return _compare_traces(a, b) if traces else _compare_runs(*runs, quick)


def _compare_traces(a: Path, b: Path) -> ExitCode:
    traces = _read_trace(a), _read_trace(b)
    common = sorted(traces[0].keys() & traces[1].keys())
    if not common:
        raise UsageError(
            f"{a} and {b} have no step in common; name two files of `kempner replay --trace`, or "
            "two runs or checkpoints"
        )
    for step in common:
        try:
            found = first_operation(traces[0][step], traces[1][step])
        except (LookupError, TypeError) as error:
            raise DataError(f"step {step} of {a} or {b} is not whole") from error
        if found is not None:
            typer.echo(f"step {step}: {found.sentence}")
            return ExitCode.CRASHED
    typer.echo(f"{count(len(common), 'step')}: equal to the bit")
    return ExitCode.COMPLETED


def _read_trace(file: Path) -> dict[int, list[Line]]:
    try:
        return traced_steps(file)
    except OSError as error:
        raise cannot_read(file, error) from error
    except (LookupError, TypeError) as error:
        raise DataError(f"{file} is no file of `kempner replay --trace`") from error


def _compare_runs(a: RunDirectory, b: RunDirectory, quick: bool) -> ExitCode:
    lines = _logged(a), _logged(b)
    compared = compare_steps(*lines)
    if not compared:
        raise UsageError(f"{a.path} and {b.path} have logged no step in common")
    differing, equal = first_step(compared)
    if differing is None:
        typer.echo(f"{count(len(compared), 'step')}: equal to the bit")
        return ExitCode.COMPLETED
    typer.echo(differing.between("in A", "in B"))
    if equal is not None and equal.step < differing.step - 1:
        typer.echo(f"the logged step before it is {equal.step}, which is equal")
    attempts = [side[differing.step]["attempt"] for side in lines]
    configs = [recorded_config(run, attempt) for run, attempt in zip((a, b), attempts, strict=True)]
    for difference in differences(*map(computing, configs)):
        typer.echo(f"configuration: {difference}")
    if part := first_part(a.parts, b.parts, range(differing.step, differing.step + 1)):
        typer.echo(part)
    _say_parameter(a, b, differing.step)
    if not quick:
        _say_operation(a, b, differing, *configs)
    return ExitCode.CRASHED


def _logged(run: RunDirectory) -> dict[int, Line]:
    try:
        return logged_steps(run.metrics, 0, sys.maxsize)
    except OSError as error:
        raise cannot_read(run.metrics, error) from error


def _say_parameter(a: RunDirectory, b: RunDirectory, step: int) -> None:
    """The first tensor that differs between the checkpoints of a step, where both have one."""
    folders = [CheckpointFolder(checkpoint_folder(run)) for run in (a, b)]
    if not all(step in folder.committed() for folder in folders):
        return
    with busy("importing torch"):
        from kempner.checkpoint.compare import open_kempner, pairs
    with reading(folders[0], step), reading(folders[1], step):
        one, other = (open_kempner(folder.step(step)) for folder in folders)
        found = list(pairs(one, other, lambda _: None))
    differing = [pair.name for pair in found if not pair.equal]
    first = f", first {differing[0]}" if differing else ""
    typer.echo(f"checkpoints: {len(differing)} of {count(len(found), 'tensor')} differ{first}")


def _say_operation(
    a: RunDirectory,
    b: RunDirectory,
    differing: ReplayedStep,
    config_a: Mapping[str, Any],
    config_b: Mapping[str, Any],
) -> None:
    """Compute the step again in both runs, and say in which operation they part."""
    step, traces, same = differing.step, list[list[Line]](), list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        for name, run in (("A", a), ("B", b)):
            file = Path(folder) / name
            typer.echo(f"step {step} of {name}, again:")
            try:
                same.append(replay(str(run.path), step, trace=file) == ExitCode.COMPLETED)
            except RunError as error:
                typer.echo(f"operation: unknown, since {name} cannot be computed again: {error}")
                return
            traced = _read_trace(file)
            if step not in traced:
                typer.echo(f"operation: unknown, since {name} was not computed again")
                return
            traces.append(traced[step])
    if parameter := first_parameter(traces[0], traces[1]):
        typer.echo(parameter)
    found = first_operation(traces[0], traces[1], (_clip(config_a), _clip(config_b)))
    typer.echo(_verdict(found, same))


def _clip(config: Mapping[str, Any]) -> float:
    return float(config.get("train", {}).get("clip_grad_norm", 0.0))


def _verdict(found: FirstOperation | None, same: list[bool]) -> str:
    if found is not None:
        return found.sentence
    off = [name for name, equal in zip("AB", same, strict=True) if not equal]
    which = f": {' and '.join(off)} had computed otherwise" if off else ""
    return (
        "operation: here and now both compute the same, so neither configuration nor data differ "
        f"in this step, but hosts, versions or memory did{which}"
    )
