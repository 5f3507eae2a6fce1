"""`kempner checkpoint export` and `import`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.checkpoint.store.inventory import checkpoints_of, locate, pick
from kempner.checkpoint.store.read_marker import reading_at
from kempner.cli.checkpoint import inspect
from kempner.cli.checkpoint.trained_on import Data, TrainedOn, find_text
from kempner.cli.progress import bar
from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, UsageError

if TYPE_CHECKING:
    from kempner.checkpoint.convert.tensor_copy import Source
    from kempner.checkpoint.format.contents import Saved


class Format(StrEnum):
    """What a checkpoint can be turned into."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


def register(app: typer.Typer) -> None:
    """Adds `export` and `import` to `checkpoint`, which is in `app` already."""
    inspect.commands.command("export")(export)
    inspect.commands.command("import")(import_)


def export(
    directory: inspect.Folder,
    out: Annotated[Path, typer.Option(help="File or folder to create; it must not exist.")],
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="safetensors: a folder for Hugging Face, with model and tokenizer. "
            "dcp: a folder for torch.distributed.checkpoint. torch: one file for torch.load.",
        ),
    ] = Format.SAFETENSORS,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; `latest` by default.")] = None,
    data: Data = None,
) -> None:
    """Write a checkpoint in another format, verifying every block."""
    if data is not None and format_ is not Format.SAFETENSORS:
        raise UsageError(f"--data has no effect with --format {format_}, which has no tokenizer")
    raise_open_file_limit()
    chosen = pick(*locate(directory), step)

    from kempner.checkpoint.convert.export import export_dcp, export_safetensors, export_torch
    from kempner.checkpoint.convert.export import model_tensors as weights
    from kempner.checkpoint.convert.tensor_copy import Source, total

    with reading_at(chosen, _warn_unmarked):
        source = Source.open(chosen)
        hugging_face = format_ is Format.SAFETENSORS
        tensors = weights(source) if hugging_face else source.contents.tensors
        form = _hugging_face(source, tensors, directory, data) if hugging_face else _HuggingFace()
        with _into(out), _counter(f"exporting {chosen.name}", total(tensors)) as on_bytes:
            if format_ is Format.TORCH:
                export_torch(source, out, on_bytes)
            elif format_ is Format.DCP:
                export_dcp(source, out, on_bytes)
            else:
                export_safetensors(source, out, form.names, form.files, on_bytes)
    typer.echo(f"{out}: {chosen.name} as {format_}, {len(tensors):,} tensors")
    if form.missing:
        typer.echo(f"kempner: {out} has no {form.missing}", err=True)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint, of kempner or of torch.distributed.checkpoint, or a run.",
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(
            metavar="RUN_DIR|DIR", help="A run without checkpoints, or its checkpoint folder."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of optimizer steps already done; by default what SRC says, otherwise 0.",
        ),
    ] = None,
    cursor: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The next sample, in the order of the run's data; by default what SRC says, "
            "otherwise 0.",
        ),
    ] = None,
) -> None:
    """Import a checkpoint as the first commit of a run."""
    raise_open_file_limit()
    own = _own_checkpoint(source)
    if own is None:
        _import_stock(source, checkpoints_of(into), step, cursor)
    else:
        _import_own(own, checkpoints_of(into), step, cursor)


def _own_checkpoint(source: Path) -> Path | None:
    """The checkpoint of kempner that is meant; None if it must be a stock one."""
    if not (source / MANIFEST).is_file() and (source / METADATA).is_file():
        return None
    try:
        folder, only = locate(source)
    except UsageError:
        return None
    return pick(folder, only, None)


def _import_own(checkpoint: Path, folder: Path, step: int | None, cursor: int | None) -> None:
    from kempner.checkpoint.convert.import_own import import_own, place_of

    with reading_at(checkpoint, _warn_unmarked):
        manifest = place_of(read(checkpoint), step, cursor)
        size = sum(entry.bytes for entry in manifest.files.values() if entry.sums is not None)
        with _into(folder), _counter("importing", size) as on_bytes:
            path = import_own(checkpoint, manifest, folder, on_bytes)
    state = manifest.train_state
    typer.echo(f"{path}: committed, step {state.step}, cursor {state.cursor}")
    typer.echo(
        "all of the train state is kept, as of a run with this data and seed"
        if step is None and cursor is None
        else "counters, recent losses and rollbacks begin anew; any data and seed will do"
    )


def _import_stock(source: Path, folder: Path, step: int | None, cursor: int | None) -> None:
    from kempner.checkpoint.convert.import_dcp import Foreign, import_dcp
    from kempner.checkpoint.convert.key_map import listed
    from kempner.checkpoint.convert.tensor_copy import total
    from kempner.checkpoint.format.contents import Saved
    from kempner.checkpoint.format.train_state import TrainState

    foreign = Foreign.open(source)
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in foreign.specs()}
    state = TrainState(step or 0, cursor or 0)
    with _into(folder), _counter("importing", total(tensors)) as on_bytes:
        path = import_dcp(foreign, folder, state, on_bytes)
    typer.echo(
        f"{path}: committed, {len(tensors):,} tensors, step {state.step}, cursor {state.cursor}"
    )
    if step is None and cursor is None:
        typer.echo(
            "a stock checkpoint does not say how far its run was: this one begins with step 0 and "
            "the first sample, unless --step and --cursor say otherwise"
        )
    if foreign.fit.left_out:
        typer.echo(f"not imported, because a run creates it: {listed(foreign.fit.left_out)}")


@dataclass(frozen=True)
class _HuggingFace:
    """Names for the weights by key, files to go with them, and what is missing among those."""

    names: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    missing: str = ""


def _hugging_face(
    source: Source, tensors: Mapping[str, Saved], directory: Path, data: Path | None
) -> _HuggingFace:
    """All that Hugging Face's Llama needs if the model is kempner's own, otherwise its own names.

    Raises `DataError` if `data` is given and cannot be used.
    """
    from kempner.checkpoint.convert.export import MODEL
    from kempner.model.spec.huggingface import llama_config, llama_name

    own = {key: key.removeprefix(MODEL) for key in tensors}
    llama = {key: name for key, ours in own.items() if (name := llama_name(ours)) is not None}
    dtype = next((saved.dtype for saved in tensors.values()), "float32")
    config = llama_config(source.manifest.identity.model, dtype)
    if len(llama) < len(own) or config is None:
        if data is not None:
            raise UsageError(
                f"--data has no effect: {source.path.name} is not of kempner's own model"
            )
        return _HuggingFace(own, missing="config.json: it is not kempner's own model")
    try:
        text = find_text(directory, source.path, source.manifest, data)
    except DataError as error:
        if data is not None:
            raise
        return _HuggingFace(llama, _files(config, None), f"tokenizer: {error}")
    return _HuggingFace(llama, _files(config, text))


def _files(config: dict[str, object], text: TrainedOn | None) -> dict[str, bytes]:
    from kempner.model.spec.huggingface import generation_config, text_config

    if text is None:
        return {"config.json": _json({**config, **text_config(None, None)})}
    eot, longest = text.tokenizer.eot, text.seq_len
    return {
        "config.json": _json({**config, **text_config(eot, longest)}),
        "generation_config.json": _json(generation_config(eot)),
        **text.tokenizer.hugging_face_files(longest),
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _warn_unmarked(error: OSError) -> None:
    typer.echo(
        f"kempner: the checkpoint's folder cannot be written to ({error.strerror}), so its run "
        "does not know that it is being read, and may delete it meanwhile",
        err=True,
    )


@contextmanager
def _into(out: Path) -> Iterator[None]:
    """Makes the folders that `out` is in; they go again if it fails.

    Says in a sentence why `out` cannot be made.
    """
    try:
        with _folders_around(out):
            yield
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists already; choose another name") from error
    except OSError as error:
        raise CheckpointWriteError(f"{out} cannot be written: {error.strerror}") from error


@contextmanager
def _folders_around(out: Path) -> Iterator[None]:
    missing = [folder for folder in out.parents if not folder.is_dir()]
    for folder in missing:
        if folder.exists():
            raise UsageError(f"{folder} is not a folder, so {out} cannot be in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # somebody else may have put something into it
                folder.rmdir()
        raise


@contextmanager
def _counter(doing: str, in_all: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes that counts what it is told."""
    done = 0
    with bar(Console(stderr=True), doing) as show:

        def count(length: int) -> None:
            nonlocal done
            done += length
            show(done, in_all)

        yield count
