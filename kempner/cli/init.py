"""`kempner init`: a new project, ready for the first job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.progress import busy
from kempner.project.site import Request, Site, choose
from kempner.project.write import CONFIG, project_files
from kempner.run.output.units import count

app = typer.Typer(rich_markup_mode=None)


@app.command("init")
def _init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write to; new or empty.")
    ] = Path(),
    sft: Annotated[
        bool, typer.Option("--sft", help="For supervised fine-tuning from chats, with an example.")
    ] = False,
) -> None:
    """Write a project: a configuration, scripts for Slurm, an example of a loop of your own.

    The scripts ask for the partition, account, GPUs and CPUs that Slurm shows here, and load the
    modules and the environment that are active. What is in DIR already stays as it is.
    """
    from kempner.project.site import find_site
    from kempner.project.write import read_templates, write_project

    with busy("asking about this site"):
        site = find_site()
    texts = project_files(site, read_templates(sft))
    kept = write_project(folder, texts)
    for line in report(folder, texts, kept, site, sft):
        typer.echo(line)


def report(
    folder: Path, texts: Collection[str], kept: Sequence[str], site: Site, sft: bool = False
) -> list[str]:
    """Lines that say what was written, for which cluster, and what to do next."""
    names = sorted(texts, key=lambda name: (name != CONFIG, name))
    tops = dict.fromkeys("".join(name.partition("/")[:2]) for name in names if name not in kept)
    request = choose(site)
    left = [f"left as it was: {', '.join(kept)}"] if kept else []
    return [
        f"wrote {', '.join(tops)} to {os.path.normpath(folder)}",
        *left,
        f"scripts/slurm: {_scripts(site, request)}",
        f"environment of a job: {_environment(site)}",
        "next:",
        *(f"  {command}" for command in next_commands(folder, request, sft)),
    ]


def next_commands(folder: Path, request: Request | None, sft: bool = False) -> list[str]:
    """The commands to type next, in the shell that `init` was started from."""
    there = os.path.normpath(folder)
    enter = "" if there == "." else f"cd {shlex.quote(there)} && "
    nodes = 1 if request is None else min(2, request.kind.count)
    start = f"sbatch --nodes={nodes} scripts/slurm/multinode.sh {CONFIG}"
    prepare = f"{_PREPARE_CHATS}  # or your own" if sft else _PREPARE
    return [
        f"{enter}{prepare}",
        f"kempner supervise {CONFIG}" if request is None else start,
    ]


_PREPARE = "kempner prepare --out data/train FILE...  # texts, .jsonl files or folders"
_PREPARE_CHATS = (
    "kempner prepare --chats --tokenizer tokenizer --seq-len 256 --out data/chats chats.jsonl"
)


def _scripts(site: Site, request: Request | None) -> str:
    if request is None:
        return f"for any cluster, since {site.trouble}"
    account = f", account {request.account}" if request.account else ""
    others = len({kind.partition for kind in request.others} - {request.kind.partition})
    more = f"; {count(others, 'other partition')} in its comments" if others else ""
    return f"for partition {request.kind.described()}{account}{more}"


def _environment(site: Site) -> str:
    found = site.environment
    if not found.container:
        return ", ".join([*found.kinds, found.python])
    outside = "kempner itself must also be installed outside of it"
    return f"{found.kinds[0]} for the ranks, in {CONFIG}; {outside}"
