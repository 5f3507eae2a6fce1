"""`kempner triage`: what failed first in a run or in logs, where, why, and what to do."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from kempner.cli.progress import busy
from kempner.insight.triage.first_failure import triage_logs, triage_run
from kempner.insight.triage.verdict import Verdict
from kempner.run.process.exit_codes import ExitCode, UsageError, cannot_read
from kempner.run.record.run_dir import RUN_LINE, RunDirectory

app = typer.Typer(rich_markup_mode=None)


@app.command()
def triage(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR|LOG...", help="A run's directory, or logs of a job of any program."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> int:
    """Say what failed first, on which rank and node, why, and what to do.

    Of a run, its ledger and the ranks' logs are read; a job's output that names its run's directory
    stands for the run. Logs may be those of Slurm, torchrun,
    Lightning or transformers; all that are given count as one job's. A folder stands for the logs
    in it. Exits with 1 if no cause was found.
    """
    with busy("reading the logs"):
        verdicts = list(_verdicts(paths))
    if as_json:
        typer.echo(json.dumps([verdict.to_json() for verdict in verdicts], indent=2))
    else:
        for number, verdict in enumerate(verdicts):
            if number:
                typer.echo()
            _print(verdict)
    known = all(verdict.known for verdict in verdicts)
    return ExitCode.COMPLETED if known else ExitCode.CRASHED


def _verdicts(paths: Sequence[Path]) -> Iterator[Verdict]:
    runs = {path: run for path in paths if (run := _run_of(path)) is not None}
    for run in runs.values():
        try:
            yield triage_run(run)
        except OSError as error:
            raise cannot_read(run.ledger, error) from error
    logs = [log for path in paths if path not in runs for log in _logs(path)]
    if logs:
        try:
            yield triage_logs(logs)
        except OSError as error:
            raise cannot_read(error.filename or logs[0], error) from error


_HEAD = 64 * 1024  # bytes of a job's output in which it names its run's directory


def _run_of(path: Path) -> RunDirectory | None:
    """The run in a directory, or that a job's output names, if its ledger can be seen from here."""
    run = RunDirectory(path)
    if path.is_file():
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD).decode("utf-8", errors="replace")
        except OSError as error:
            raise cannot_read(path, error) from error
        named = [line for line in head.splitlines() if line.startswith(RUN_LINE)]
        run = RunDirectory(Path(named[-1].removeprefix(RUN_LINE)) if named else path)
    return run if run.ledger.is_file() else None


_LOGS = (".log", ".out", ".err", ".txt", ".jsonl", ".gz")


def _logs(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"{path} is not there; name a run's directory, or a log")
        return [path]
    logs = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in _LOGS]
    if not logs:
        raise UsageError(
            f"{path} is neither a run, which has a ledger.jsonl, nor a folder with logs "
            f"({', '.join(_LOGS)})"
        )
    return logs


def _print(verdict: Verdict) -> None:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name, value in _rows(verdict):
        for line in table_row(name, value, columns):
            typer.echo(line)


def table_row(name: str, value: str, columns: int | None) -> list[str]:
    """A name and its value, in lines of at most `columns` characters; on a narrow screen the name
    has a line of its own. None: one line, however long.
    """
    if columns is None or len(value) + 19 <= columns:
        return [f"{name:<18} {value}"]
    if columns >= 60:
        indent = 19 * " "
        return wrap(value, columns, initial_indent=f"{name:<18} ", subsequent_indent=indent)
    if len(name) + len(value) + 2 <= columns:
        return [f"{name}: {value}"]
    return [f"{name}:", *wrap(value, columns, initial_indent="  ", subsequent_indent="  ")]


def _rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    sure = f", {verdict.sure.label}" if verdict.known else ""
    yield "cause", f"{verdict.says} ({verdict.cause}{sure})"
    if verdict.rank is not None or verdict.node is not None:
        rank = "" if verdict.rank is None else f"rank {verdict.rank}"
        node = "" if verdict.node is None else f"on {verdict.node}"
        yield "failed first", f"{rank} {node}".strip()
    if verdict.first_error.raised:
        yield "said", verdict.first_error.raised
    if verdict.first_error.frame:
        yield "line of code", verdict.first_error.frame
    yield "what to do", verdict.do
    for name, sentences in (("note", verdict.notes), ("others", verdict.consequences)):
        for sentence in sentences:
            yield name, sentence
    for evidence in verdict.evidence:
        if evidence.text != verdict.first_error.raised or len(verdict.evidence) == 1:
            name = "evidence" if verdict.known else "likely line"
            yield name, f"{evidence.place}: {evidence.text}"
