"""`kempner checkpoint export` and `import`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kempner.checkpoint.store.inventory import checkpoints_of, locate, pick
from kempner.checkpoint.store.read_marker import reading_at
from kempner.cli import checkpoint
from kempner.cli.progress import bar
from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.run.process.exit_codes import UsageError, cannot_write

if TYPE_CHECKING:
    from kempner.checkpoint.convert.tensor_copy import Source


class Format(StrEnum):
    """What a checkpoint can be turned into."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def register(app: typer.Typer) -> None:
    """Adds `export` and `import` to `checkpoint`, which is in `app` already."""
    checkpoint.commands.command("export")(export)
    checkpoint.commands.command("import")(import_)


def export(
    directory: checkpoint.Folder,
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="dcp: a folder for torch.distributed.checkpoint. safetensors: a folder with the "
            "model's weights, in Hugging Face's format. torch: one file for torch.load.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File or folder to create; it must not exist.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; `latest` by default.")] = None,
) -> None:
    """Write a checkpoint in another format, verifying every block."""
    raise_open_file_limit()
    chosen = pick(*locate(directory), step)

    from kempner.checkpoint.convert.export import export_dcp, export_safetensors, export_torch
    from kempner.checkpoint.convert.export import model_tensors as weights
    from kempner.checkpoint.convert.tensor_copy import Source, total

    with _into(out), reading_at(chosen):
        source = Source.open(chosen)
        tensors = weights(source) if format_ is Format.SAFETENSORS else source.contents.tensors
        with _counter(f"exporting {chosen.name}", total(tensors)) as on_bytes:
            if format_ is Format.TORCH:
                export_torch(source, out, on_bytes)
            elif format_ is Format.DCP:
                export_dcp(source, out, on_bytes)
            else:
                names, besides = _as_hugging_face(source)
                export_safetensors(source, out, names, besides, on_bytes)
    typer.echo(f"{out}: {chosen.name} as {format_}, {len(tensors):,} tensors")


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A folder that torch.distributed.checkpoint wrote."),
    ],
    into: Annotated[
        Path,
        typer.Option(
            metavar="RUN_DIR|DIR", help="A run without checkpoints, or its checkpoint folder."
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="Number of optimizer steps already done.")] = 0,
    cursor: Annotated[
        int, typer.Option(min=0, help="The next sample, in the order of the run's data.")
    ] = 0,
) -> None:
    """Import a stock torch.distributed.checkpoint as the first commit of a run."""
    from kempner.checkpoint.convert.import_dcp import Foreign, take_over
    from kempner.checkpoint.convert.key_map import listed
    from kempner.checkpoint.convert.tensor_copy import total
    from kempner.checkpoint.format.contents import Saved
    from kempner.checkpoint.format.train_state import TrainState

    foreign = Foreign.open(source)
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in foreign.specs()}
    folder = checkpoints_of(into)
    with _into(folder), _counter("importing", total(tensors)) as on_bytes:
        path = take_over(foreign, folder, TrainState(step, cursor), on_bytes)
    typer.echo(f"{path}: committed, {len(tensors):,} tensors, step {step}, cursor {cursor}")
    if foreign.fit.left_out:
        typer.echo(f"not imported, because a run creates it: {listed(foreign.fit.left_out)}")


def _as_hugging_face(source: Source) -> tuple[dict[str, str], dict[str, bytes]]:
    """Names for the weights by key, and files to go with them.

    Those of Hugging Face's Llama if the model is kempner's own, otherwise the model's.
    """
    from kempner.checkpoint.convert.export import MODEL, model_tensors
    from kempner.model.spec.huggingface import llama_config, llama_name

    tensors = model_tensors(source)
    own = {key: key.removeprefix(MODEL) for key in tensors}
    llama = {key: name for key, ours in own.items() if (name := llama_name(ours)) is not None}
    dtype = next((saved.dtype for saved in tensors.values()), "float32")
    config = llama_config(source.manifest.identity.model, dtype)
    if len(llama) < len(own) or config is None:
        return own, {}
    return llama, {"config.json": (json.dumps(config, indent=2) + "\n").encode()}


@contextmanager
def _into(out: Path) -> Iterator[None]:
    """Says in a sentence why `out` cannot be made."""
    try:
        yield
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists already; choose another name") from error
    except OSError as error:
        raise cannot_write(out, error) from error


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
