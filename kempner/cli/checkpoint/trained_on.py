"""The model of a checkpoint, and the text that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kempner.checkpoint.format.manifest import Manifest
from kempner.data.files.index import fingerprint, read_index
from kempner.data.files.text import TextTokenizer
from kempner.run.process.exit_codes import DataError
from kempner.run.record.recorded_config import recorded_config
from kempner.run.record.run_dir import RunDirectory

if TYPE_CHECKING:
    import torch

    from kempner.model.spec.shape import Shape
    from kempner.model.transformer import Transformer

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Prepared data whose tokenizer is the model's; by default what the run trained on.",
    ),
]


@dataclass(frozen=True)
class TrainedOn:
    """`seq_len` is the number of tokens in a sequence; `dtype` is the run's `train.dtype`."""

    tokenizer: TextTokenizer
    seq_len: int
    dtype: str


def find_text(
    directory: Path, checkpoint: Path, manifest: Manifest, data: Path | None
) -> TrainedOn:
    """What the checkpoint's run says of its text; `directory` is what the user called the run.

    Raises `DataError` if that is not there, or does not fit the model; warns if it is not what the
    checkpoint was trained on.
    """
    run = run_of_checkpoint(directory, checkpoint)
    config = recorded_config(run, manifest.attempt)
    try:
        prepared = data or Path(config["data"]["dataset_path"])
        train = config["train"]
        seq_len, dtype = int(train["seq_len"]), str(train.get("dtype", "auto"))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{run.config} does not say what {checkpoint.name} was trained on; name the directory "
            "of its run, as it was trained"
        ) from error
    if data is None and not prepared.is_dir():
        raise DataError(
            f"the data of this run, {prepared}, is not there; start this command where the run was "
            "started, or name the folder with --data"
        )
    tokenizer = TextTokenizer.of(prepared)
    if tokenizer.vocab_size > manifest.identity.model.get("vocab_size", tokenizer.vocab_size):
        raise DataError(
            f"{prepared} has {tokenizer.vocab_size} token ids, the model of {checkpoint.name} "
            f"{manifest.identity.model['vocab_size']}: name the data that it was trained on with "
            "--data"
        )
    expected = manifest.identity.data_fingerprint
    if expected and fingerprint(read_index(prepared), seq_len) != expected:
        typer.echo(
            f"kempner: {prepared} is not the data that {checkpoint.name} was trained on: the text "
            "is right only if the tokenizer is the same",
            err=True,
        )
    return TrainedOn(tokenizer, seq_len, dtype)


def run_of_checkpoint(directory: Path, checkpoint: Path) -> RunDirectory:
    """The directory of the run: as the user called it, or where the checkpoint lies by default."""
    named, around = RunDirectory(directory), RunDirectory(checkpoint.resolve().parent.parent)
    return around if around.config.is_file() and not named.config.is_file() else named


def check_described(checkpoint: Path, manifest: Manifest) -> None:
    """Raise `DataError` if a checkpoint does not say what its model is."""
    if not manifest.identity.model:
        raise DataError(
            f"{checkpoint} does not say what its model is like: only those that `kempner train` or "
            "`supervise` has trained from a configuration do"
        )


def recorded_shape(checkpoint: Path, manifest: Manifest, seq_len: int) -> Shape:
    """The model of a checkpoint that is described. Raises `DataError` if it is of no known kind."""
    from kempner.model.spec.shape import Shape

    known: dict[str, Any] = dict(manifest.identity.model)
    try:
        return Shape.recorded(known, seq_len)
    except TypeError as error:
        raise DataError(f"{checkpoint} is of a model that this kempner does not have") from error


def load_model(
    checkpoint: Path, manifest: Manifest, shape: Shape, dtype: str, device: torch.device
) -> Transformer:
    """The model with the weights of a checkpoint. Raises `DataError` if it is damaged."""
    from kempner.checkpoint.tensors.load import fill, open_contents
    from kempner.model.sharding import build_to_load, compute_dtype

    model = build_to_load(shape, compute_dtype(dtype, device), device)
    contents = open_contents(checkpoint, manifest)
    table = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for key, tensor in table.items():
        saved = contents.tensors.get(key)
        if saved is None or tuple(saved.shape) != tuple(tensor.shape):
            raise DataError(f"{checkpoint} does not contain {key} as its own description says")
    fill(table, checkpoint, manifest, contents)
    return model
