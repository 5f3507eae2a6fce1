"""`kempner download`: a model of Hugging Face, to import or to prepare data with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kempner.cli.checkpoint.hub import (
    HubExchange,
    RepositoryArgument,
    RetriesOption,
    files_of,
    one_at_a_time,
    open_hub,
)
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import CannotReadError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

app = typer.Typer(rich_markup_mode=None)

_LOCK = ".cache/kempner-download.lock"
RECORD = ".cache/kempner-download.json"
"""In a folder that was downloaded: repository, revision, its commit, and which files are whole."""


@app.command("download")
def download(
    repository: RepositoryArgument,
    output_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for its files, new or to be completed.")
    ],
    ignore_patterns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help='Files to leave out, such as "*.pth" or "original/*"; may be given several times.',
        ),
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    retries: RetriesOption = 5,
) -> None:
    """Download a model from Hugging Face; after an interruption, run it again to go on.

    The token for private models is taken from HF_TOKEN.
    """
    api, exchange = open_hub("download"), HubExchange(repository, revision, "downloaded", "read")
    with one_at_a_time(output_dir, _LOCK):
        files = exchange.persist(
            lambda: _fetch(api, repository, revision, output_dir, ignore_patterns or []), retries
        )
    typer.echo(f"{output_dir}: {len(files):,} files, {sum(files.values()):,} bytes")


def _fetch(
    api: HfApi, repository: str, revision: str, folder: Path, ignore: list[str]
) -> dict[str, int]:
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    # Asked first: if the hub does not answer, snapshot_download takes the folder's files for
    # all of them.
    commit = api.repo_info(repository, revision=revision).sha
    there = files_of(api, repository, str(commit))
    if not there:
        raise UsageError(f"{repository} has no file in its revision {revision}")
    wanted = {path: there[path] for path in filter_repo_objects(there, ignore_patterns=ignore)}
    api.snapshot_download(
        repository, revision=commit, local_dir=folder, ignore_patterns=ignore or None
    )
    whole = _read_record(folder).get("files", {})
    found = {path: _check(folder, file, whole.get(path)) for path, file in wanted.items()}
    record = {"repository": repository, "revision": revision, "commit": commit, "files": found}
    content = (json.dumps(record, indent=2) + "\n").encode()
    replace_durable(folder / RECORD, content, unique="kempner")
    return {path: file.size for path, file in wanted.items()}


def _check(folder: Path, file: RepoFile, known: object) -> list[Any]:
    """What proves from now on that a file is whole: its digest, and when it was written. Raises
    `CannotReadError`, and removes the file, if it is another one than the hub has."""
    path = folder / file.path
    try:
        facts = path.stat()
    except FileNotFoundError:
        facts = None
    digest = file.blob_id if file.lfs is None else file.lfs.sha256
    if facts is not None and facts.st_size == file.size:
        proof = [digest, facts.st_mtime_ns]
        if known == proof or _digest(path, file) == digest:
            return proof
    path.unlink(missing_ok=True)
    raise CannotReadError(f"{path} is incomplete, or damaged; the same command goes on from here")


def _digest(path: Path, file: RepoFile) -> str:
    """As the hub has it: SHA-256 of a large file, git's name of another one."""
    with path.open("rb") as content:
        if file.lfs is not None:
            return hashlib.file_digest(content, "sha256").hexdigest()
        started = hashlib.sha1(b"blob %d\0" % file.size)
        return hashlib.file_digest(content, lambda: started).hexdigest()


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def downloaded_from(folder: Path) -> dict[str, str]:
    """`repository` and `commit` of a folder that `kempner download` has filled; else nothing."""
    found = _read_record(folder)
    source = {key: found.get(key) for key in ("repository", "commit")}
    return {key: value for key, value in source.items() if isinstance(value, str)}
