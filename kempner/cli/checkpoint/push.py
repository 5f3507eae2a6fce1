"""`kempner checkpoint push`: a checkpoint as a model on Hugging Face's hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kempner.checkpoint.store.retention import locate, pick
from kempner.cli.checkpoint import inspect
from kempner.cli.checkpoint.convert import (
    DtypeOption,
    TokenizerOption,
    check_tokenizer,
    write_model,
)
from kempner.cli.checkpoint.hub import (
    HubExchange,
    RepositoryArgument,
    RetriesOption,
    files_of,
    one_at_a_time,
    open_hub,
)
from kempner.cli.checkpoint.trained_on import Data, Step, run_of_checkpoint
from kempner.run.process.exit_codes import CannotReadError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

_WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Ends of what an earlier push may have left under other names: a model must not be two."""


@inspect.commands.command("push")
def push(
    directory: inspect.Folder,
    repository: RepositoryArgument,
    private: Annotated[
        bool, typer.Option("--private", help="Create it so that only you and yours see it.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Branch, created where it is missing.")] = "main",
    step: Step = None,
    dtype: DtypeOption = None,
    data: Data = None,
    tokenizer: TokenizerOption = None,
    retries: RetriesOption = 5,
) -> None:
    """Upload a checkpoint to Hugging Face, as `export` writes it with a model card, in one commit.

    After an interruption, run it again: what was uploaded is not sent twice, and until all is
    there the repository shows nothing of it. The token is that of HF_TOKEN, or of `hf auth login`.
    """
    api, exchange = (
        open_hub("checkpoint push"),
        HubExchange(repository, revision, "uploaded", "write"),
    )
    check_tokenizer(data, tokenizer)
    chosen = pick(*locate(directory), step)
    work = run_of_checkpoint(directory, chosen).exports
    exchange.persist(lambda: _create(api, repository, revision, private), retries)
    with one_at_a_time(work, "push.lock"):
        model = work / "push"
        shutil.rmtree(model, ignore_errors=True)  # of a push that was killed
        try:
            write_model(chosen, directory, model, dtype, data, tokenizer)
            commit = exchange.persist(
                lambda: _upload(api, repository, revision, model, f"{chosen.name} by kempner"),
                retries,
            )
        finally:
            shutil.rmtree(model, ignore_errors=True)
    typer.echo(f"{repository}: {chosen.name} is commit {commit} of {revision}")


def _create(api: HfApi, repository: str, revision: str, private: bool) -> None:
    api.create_repo(repository, private=private or None, exist_ok=True)
    if private and api.repo_info(repository).private is not True:
        raise UsageError(
            f"{repository} is there already, and public: make it private on its page, or leave out "
            "--private"
        )
    if revision != "main":
        api.create_branch(repository, branch=revision, exist_ok=True)


def _upload(api: HfApi, repository: str, revision: str, model: Path, message: str) -> str:
    """The commit. What it replaces stays whole until it is there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files = {path.name: path for path in sorted(model.iterdir())}
    there = files_of(api, repository, revision)
    old = [name for name in there if name.endswith(_WEIGHTS) and name not in files]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
        *(CommitOperationDelete(name) for name in old if "/" not in name),
    ]
    # Not upload_folder, which may commit as it goes.
    made = api.create_commit(repository, operations, commit_message=message, revision=revision)
    if not isinstance(made.oid, str):
        raise ValueError("the hub names no commit")
    _compare(files, files_of(api, repository, made.oid))
    return made.oid


def _compare(files: dict[str, Path], there: dict[str, RepoFile]) -> None:
    """Raises `CannotReadError` if a commit does not have these files."""
    for name, path in files.items():
        found = there.get(name)
        if found is None or found.size != path.stat().st_size:
            raise CannotReadError(f"the hub has another {name} than was sent: push again")
