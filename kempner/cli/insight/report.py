"""`kempner report`: one HTML file about one run or several."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

import kempner
from kempner.cli.progress import busy
from kempner.cli.usage import usable_path
from kempner.insight.report.page.document import page
from kempner.insight.report.page.words import share
from kempner.insight.report.summary import read_run
from kempner.run.output.units import count
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)

DEFAULT = Path("report.html")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to write, or to replace.")
    ] = DEFAULT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON instead, a list of runs.")
    ] = False,
) -> None:
    """Write one HTML file that says what happened to a run, or to several side by side.

    Where its time went, what interrupted it and what that cost. Works while the run goes on.
    """
    with busy(f"reading {count(len(runs), 'run')}"):
        read = [read_run(RunDirectory(usable_path(run))) for run in runs]
    if as_json:
        typer.echo(json.dumps([_finite(data.report.to_json()) for data in read], indent=2))
        return
    with busy("drawing"):
        content = page(read, kempner.__version__)
    path = usable_path(output)
    try:
        replace_durable(path, content.encode(), unique="report")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); name another file with --output"
        ) from error
    for found in (data.report for data in read):
        many = count(len(found.interruptions), "interruption")
        goodput = "unknown" if found.time.goodput is None else share(found.time.goodput)
        typer.echo(f"{output}: {found.name}: {found.training.state}, goodput {goodput}, {many}")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
