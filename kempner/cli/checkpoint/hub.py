"""Hugging Face's hub, as `kempner download` and `kempner checkpoint push` speak with it: its errors
as sentences, and another try where it fails for a moment.

The token is the hub's own affair (HF_TOKEN, or what `hf auth login` has kept): it is in no argument
here, and nothing that the hub answers is printed.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kempner.run.process.exit_codes import CannotReadError, RunError, UsageError, cannot_write

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

T = TypeVar("T")

RepositoryArgument = Annotated[
    str, typer.Argument(metavar="REPO", help="Name on Hugging Face, as in Qwen/Qwen3-32B.")
]
RetriesOption = Annotated[
    int,
    typer.Option(
        min=0, help="Further tries where the hub does not answer, or a connection is cut."
    ),
]

_AGAIN = "the same command goes on from here"
_LONGEST_PAUSE = 60.0
_FOR_A_MOMENT = (408, 409, 425, 429)
"""HTTP's codes below 500 that say nothing for good; 409 of a commit beside another one."""


def open_hub(command: str) -> HfApi:
    """The library's client. Raises `UsageError` if it is not installed."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError(
            f"{command} needs the package huggingface_hub: pip install 'kempner[hf]'"
        ) from error
    return HfApi()


@dataclass(frozen=True)
class HubExchange:
    """What is done with a repository, as sentences say it: `done` is "downloaded", and `right`
    "read"."""

    repository: str
    revision: str
    done: str
    right: str

    def persist(self, action: Callable[[], T], retries: int) -> T:
        """What `action` returns; up to `retries` times once more where it fails for a moment.
        Raises `UsageError` for what another try does not help, `CannotReadError` else."""
        for number in range(retries):
            try:
                with self._explained():
                    return action()
            except CannotReadError as error:
                pause = min(2.0**number, _LONGEST_PAUSE)
                typer.echo(f"kempner: {error} (next try in {pause:.0f} s)", err=True)
                time.sleep(pause)
        with self._explained():
            return action()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from huggingface_hub import errors

        # The base of all errors of the HTTP library, whichever one the hub's library uses.
        transport: Any = errors.HfHubHTTPError.__bases__[0]
        try:
            yield
        except RunError:
            raise
        except errors.HFValidationError as error:
            raise UsageError(
                f"{self.repository} is not the name of a model; write OWNER/NAME"
            ) from error
        # The library checks few answers: what makes no sense raises any of these, and an upload
        # wraps whatever it met.
        except (transport, OSError, ValueError, LookupError, TypeError, AttributeError,
                RuntimeError) as error:  # fmt: skip
            cause = _innermost(error)
            if isinstance(cause, errors.HfHubHTTPError):
                raise self._refused(cause) from error
            met = (transport, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
            if isinstance(cause, OSError) and cause.errno and not isinstance(cause, met):
                raise cause from error  # of a disk here
            why = (
                f"Hugging Face does not answer, or stopped in the middle ({type(cause).__name__})"
                if isinstance(cause, met)
                else f"what Hugging Face answers makes no sense ({type(cause).__name__})"
            )
            raise CannotReadError(
                f"{self.repository} cannot be {self.done}: {why}; {_AGAIN}"
            ) from error

    def _refused(self, error: Any) -> RunError:
        from huggingface_hub import errors

        name, status = self.repository, error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            return UsageError(
                f"{name} is only for those who have asked for it: ask on its page, and set "
                "HF_TOKEN to a token of yours"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return UsageError(
                f"there is no model {name}, or none that you may see: look at its name, and for "
                "a private one set HF_TOKEN to a token of yours"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return UsageError(f"{name} has no revision {self.revision}")
        if status in (401, 403):
            return UsageError(
                f"Hugging Face refuses {name} (HTTP {status}): set HF_TOKEN to a token that may "
                f"{self.right} it"
            )
        message = f"{name} cannot be {self.done}: Hugging Face answers with HTTP {status}"
        if status < 500 and status not in _FOR_A_MOMENT:
            return UsageError(f"{message}, which another try does not help")
        return CannotReadError(f"{message}; {_AGAIN}")


def _innermost(error: BaseException) -> BaseException:
    """What an error of the hub's library came from, where it has wrapped it."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def files_of(api: HfApi, repository: str, commit: str) -> dict[str, RepoFile]:
    """The files of a commit, by path."""
    from huggingface_hub import RepoFile

    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


@contextmanager
def one_at_a_time(folder: Path, lock_file: str) -> Iterator[None]:
    """If several processes use a folder, one works on it and the others wait. Raises
    `CannotWriteError` for what the folder's disk refuses."""
    try:
        path = folder / lock_file
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # no locks here; the hub's library locks single files itself
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            yield
    except OSError as error:
        raise cannot_write(folder, error) from error
