"""`kempner download`: a model of Hugging Face, to import or to prepare data with."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kempner.run.process.exit_codes import CannotReadError, UsageError, cannot_write

if TYPE_CHECKING:
    from huggingface_hub import HfApi

app = typer.Typer(rich_markup_mode=None)

_LOCK = ".cache/kempner-download.lock"


@app.command("download")
def download(
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="Name on Hugging Face, as in Qwen/Qwen3-32B.")
    ],
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
) -> None:
    """Download a model from Hugging Face; after an interruption, run it again to go on.

    The token for private models is taken from HF_TOKEN.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError(
            "download needs the package huggingface_hub: pip install 'kempner[hf]'"
        ) from error
    with _one_at_a_time(output_dir), _explained(repository, revision):
        files = _fetch(HfApi(), repository, revision, output_dir, ignore_patterns or [])
    typer.echo(f"{output_dir}: {len(files):,} files, {sum(files.values()):,} bytes")


def _fetch(
    api: HfApi, repository: str, revision: str, folder: Path, ignore: list[str]
) -> dict[str, int]:
    from huggingface_hub import RepoFile
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    # Asked first: if the hub does not answer, snapshot_download takes the folder's files for
    # all of them.
    commit = api.repo_info(repository, revision=revision).sha
    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    sizes = {file.path: file.size for file in tree if isinstance(file, RepoFile)}
    wanted = {path: sizes[path] for path in filter_repo_objects(sizes, ignore_patterns=ignore)}
    api.snapshot_download(
        repository, revision=commit, local_dir=folder, ignore_patterns=ignore or None
    )
    for path, size in wanted.items():
        there = folder / path
        if not there.is_file() or there.stat().st_size != size:
            raise CannotReadError(f"{there} is incomplete; the same command goes on from here")
    return wanted


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """If several processes of a job run the command, one downloads and the others wait."""
    try:
        lock_file = folder / _LOCK
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        with open(lock_file, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # no locks here; the hub's library locks single files itself
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            yield
    except OSError as error:
        raise cannot_write(folder, error) from error


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    from huggingface_hub import errors

    # The base of all errors of the HTTP library, whichever one the hub's library uses.
    transport: Any = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(f"{repository} is not the name of a model; write OWNER/NAME") from error
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{repository} is only for those who have asked for it: ask on its page, and set "
            "HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"there is no model {repository}, or none that you may see: look at its name, and for "
            "a private one set HF_TOKEN to a token of yours"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"{repository} has no revision {revision}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(
                f"Hugging Face refuses {repository} (HTTP {status}): set HF_TOKEN to a token that "
                "may read it"
            ) from error
        raise CannotReadError(
            f"{repository} cannot be downloaded: Hugging Face answers with HTTP {status}; the same "
            "command goes on from here"
        ) from error
    except (transport, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise CannotReadError(
            f"{repository} cannot be downloaded: Hugging Face does not answer, or stopped in the "
            f"middle ({type(error).__name__}); the same command goes on from here"
        ) from error
