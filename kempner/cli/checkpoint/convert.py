"""`kempner checkpoint export` and `import`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.checkpoint.store.retention import checkpoints_of, locate, pick, reading_at
from kempner.cli.checkpoint import inspect
from kempner.cli.checkpoint.download import downloaded_from
from kempner.cli.checkpoint.hugging_face import (
    CONFIG,
    described,
    exported_form,
    is_hugging_face,
    read_model,
    taken_from,
)
from kempner.cli.checkpoint.trained_on import Data, Step, run_of_checkpoint
from kempner.cli.progress import busy, counter
from kempner.cluster.machine import raise_open_file_limit
from kempner.run.process.exit_codes import UsageError, cannot_write


class WeightType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


OutOption = Annotated[
    Path | None, typer.Option(help="File or folder to create; it must not exist.")
]
ToHfOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder to create for Hugging Face: --out DIR in safetensors."
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="safetensors: a folder for Hugging Face, with model and tokenizer. "
        "dcp: a folder for torch.distributed.checkpoint. torch: one file for torch.load.",
    ),
]
DtypeOption = Annotated[
    WeightType | None,
    typer.Option(help="Type of the weights in safetensors; as in the checkpoint by default."),
]
MergeOption = Annotated[
    bool,
    typer.Option("--merge", help="Of a run with an adapter: the whole model, with it added."),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR",
        help="Of a run with an adapter: the model that it was imported from, for PEFT; by default "
        "its repository, if it was downloaded, or the folder of --tokenizer.",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of Hugging Face whose tokenizer and settings the model has, such as the "
        "one that it was imported from.",
    ),
]


@inspect.commands.command("export")
def export(
    directory: inspect.Folder,
    out: OutOption = None,
    to_hf: ToHfOption = None,
    format_: FormatOption = Format.SAFETENSORS,
    step: Step = None,
    dtype: DtypeOption = None,
    data: Data = None,
    tokenizer: TokenizerOption = None,
    merge: MergeOption = False,
    base: BaseOption = None,
) -> None:
    """Write a checkpoint in another format, verifying every block; an adapter as PEFT reads it."""
    given: dict[str, object] = {"--to-hf": to_hf, "--data": data, "--dtype": dtype}
    _refuse_idle(format_, {**given, "--tokenizer": tokenizer, "--merge": merge, "--base": base})
    out = _one_of({"--out": out, "--to-hf": to_hf})
    check_tokenizer(data, tokenizer)
    chosen = pick(*locate(directory), step)
    if format_ is Format.SAFETENSORS:
        write_model(chosen, directory, out, dtype, data, tokenizer, merge, base)
        return
    raise_open_file_limit()
    with busy("importing torch"):
        from kempner.checkpoint.convert.export import export_dcp, export_torch
        from kempner.checkpoint.convert.tensor_copy import Source, total

    with reading_at(chosen, inspect.warn_unmarked):
        source = Source.open(chosen)
        tensors = source.contents.tensors
        write = export_torch if format_ is Format.TORCH else export_dcp
        with _into(out), counter(f"exporting {chosen.name}", total(tensors)) as on_bytes:
            write(source, out, on_bytes)
    typer.echo(f"{out}: {chosen.name} as {format_}, {len(tensors):,} tensors")


def check_tokenizer(data: Path | None, tokenizer: Path | None) -> None:
    if None not in (data, tokenizer):
        raise UsageError("--data and --tokenizer both name a tokenizer; give one of them")


def write_model(
    chosen: Path,
    directory: Path,
    out: Path,
    dtype: str | None,
    data: Path | None,
    tokenizer: Path | None,
    merge: bool = False,
    base: str | None = None,
) -> None:
    """The model of a checkpoint as a folder for Hugging Face, with its card; says what it has."""
    raise_open_file_limit()
    with busy("importing torch"):
        from kempner.checkpoint.convert.export import export_safetensors
        from kempner.checkpoint.convert.tensor_copy import Source, total
        from kempner.insight.model_card import CARD, card, known_facts

    with reading_at(chosen, inspect.warn_unmarked):
        source = taken_from(Source.open(chosen), merge, base)
        facts = known_facts(run_of_checkpoint(directory, chosen), source.manifest, loads=False)
        base = base or facts.base_model.get("repository")
        form, missing = exported_form(source, directory, dtype, data, tokenizer, base)
        tensors = {key: source.tensors[key] for key in form.tensors}
        facts = replace(facts, loads=CONFIG in form.files)
        form = replace(form, files={**form.files, CARD: card(facts).encode()})
        with _into(out), counter(f"exporting {chosen.name}", total(tensors)) as on_bytes:
            export_safetensors(source, out, form, on_bytes)
    typer.echo(f"{out}: {chosen.name} as safetensors, {len(tensors):,} tensors")
    if missing:
        typer.echo(f"kempner: {out} has no {missing}", err=True)


def _refuse_idle(format_: Format, given: Mapping[str, object]) -> None:
    """Raise `UsageError` for options that have no effect on a format."""
    if format_ is not Format.SAFETENSORS and (idle := [o for o, v in given.items() if v]):
        raise UsageError(f"{idle[0]} has no effect with --format {format_}")


IntoOption = Annotated[
    Path,
    typer.Option(
        metavar="RUN_DIR|DIR", help="A run without checkpoints, or its checkpoint folder."
    ),
]
SourceArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint, of kempner or of torch.distributed.checkpoint, a run, or a model "
        "of Hugging Face in safetensors.",
    ),
]
FromHfOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="In place of SRC: a model of Hugging Face, nothing else."),
]
StepOption = Annotated[
    int | None,
    typer.Option(
        min=0, help="Number of optimizer steps already done; by default what SRC says, otherwise 0."
    ),
]
CursorOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The next sample, in the order of the run's data; by default what SRC says, "
        "otherwise 0.",
    ),
]
VocabMultipleOption = Annotated[
    int | None,
    typer.Option(min=1, help="model.vocab_multiple of a run that imports from Hugging Face."),
]


@inspect.commands.command("import")
def import_(
    into: IntoOption,
    source: SourceArgument = None,
    from_hf: FromHfOption = None,
    step: StepOption = None,
    cursor: CursorOption = None,
    vocab_multiple: VocabMultipleOption = None,
) -> None:
    """Import a checkpoint as the first commit of a run."""
    raise_open_file_limit()
    source = _one_of({"SRC": source, "--from-hf": from_hf})
    if from_hf is not None or is_hugging_face(source):
        _import_hugging_face(source, checkpoints_of(into), step, cursor, vocab_multiple or 1)
        return
    if vocab_multiple is not None:
        raise UsageError("--vocab-multiple has an effect on a model of Hugging Face only")
    own = _own_checkpoint(source)
    if own is None:
        _import_stock(source, checkpoints_of(into), step, cursor)
    else:
        _import_own(own, checkpoints_of(into), step, cursor)


def _one_of(given: Mapping[str, Path | None]) -> Path:
    """The path that was given by one of several options. Raises `UsageError`."""
    found = [path for path in given.values() if path is not None]
    if len(found) != 1:
        raise UsageError(f"give {' or '.join(given)}{', not both' * bool(found)}")
    return found[0]


def _import_hugging_face(
    source: Path, folder: Path, step: int | None, cursor: int | None, vocab_multiple: int
) -> None:
    with busy("importing torch"):
        from kempner.checkpoint.convert.import_safetensors import import_weights
        from kempner.checkpoint.convert.tensor_copy import total
        from kempner.checkpoint.format.manifest import TrainState
        from kempner.insight.model_card import keep_base_model

    section, weights = read_model(source, vocab_multiple)
    state = TrainState(step or 0, cursor or 0)
    with _into(folder), counter("importing", total(weights.saved)) as on_bytes:
        path = import_weights(weights, folder, state, on_bytes)
        keep_base_model(folder, downloaded_from(source))
    typer.echo(
        f"{path}: committed, {len(weights.located):,} tensors, step {state.step}, cursor "
        f"{state.cursor}"
    )
    typer.echo(f"the configuration of its run needs\n\n{described(section)}")


def _own_checkpoint(source: Path) -> Path | None:
    """The kempner checkpoint in `source`; None if it must be one of
    torch.distributed.checkpoint."""
    if not (source / MANIFEST).is_file() and (source / METADATA).is_file():
        return None
    try:
        folder, only = locate(source)
    except UsageError:
        return None
    return pick(folder, only, None)


def _import_own(checkpoint: Path, folder: Path, step: int | None, cursor: int | None) -> None:
    with busy("importing torch"):
        from kempner.checkpoint.convert.first_commit import import_own, place_of

    with reading_at(checkpoint, inspect.warn_unmarked):
        manifest = place_of(read(checkpoint), step, cursor)
        if manifest.identity.base is not None:
            raise UsageError(
                f"{checkpoint} holds an adapter, and not the weights beside it: make one model of "
                f"both (kempner checkpoint export {checkpoint} --merge --to-hf DIR), and import "
                "that"
            )
        size = sum(entry.bytes for entry in manifest.files.values() if entry.sums is not None)
        with _into(folder), counter("importing", size) as on_bytes:
            path = import_own(checkpoint, manifest, folder, on_bytes)
    state = manifest.train_state
    typer.echo(f"{path}: committed, step {state.step}, cursor {state.cursor}")
    typer.echo(
        "all of the train state is kept, as of a run with this data and seed"
        if step is None and cursor is None
        else "counters, recent losses and rollbacks begin anew; any data and seed will do"
    )


def _import_stock(source: Path, folder: Path, step: int | None, cursor: int | None) -> None:
    with busy("importing torch"):
        from kempner.checkpoint.convert.import_dcp import StockCheckpoint, import_dcp, listed
        from kempner.checkpoint.convert.tensor_copy import total
    from kempner.checkpoint.format.contents import Saved
    from kempner.checkpoint.format.manifest import TrainState

    foreign = StockCheckpoint.open(source)
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in foreign.specs()}
    state = TrainState(step or 0, cursor or 0)
    with _into(folder), counter("importing", total(tensors)) as on_bytes:
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


@contextmanager
def _into(out: Path) -> Iterator[None]:
    """Create the parents of `out`; remove them again, and raise `UsageError` or as `cannot_write`,
    if the block fails."""
    missing = [folder for folder in out.parents if not folder.is_dir()]
    for folder in missing:
        if folder.exists():
            raise UsageError(f"{folder} is not a folder, so {out} cannot be in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for folder in missing:
            with suppress(OSError):  # another process may have written into it
                folder.rmdir()
        if isinstance(error, FileExistsError):
            raise UsageError(f"{error.filename} exists already; choose another name") from error
        if isinstance(error, OSError):
            raise cannot_write(out, error) from error
        raise
