"""What text the model of a checkpoint was trained on: its tokenizer, and how much of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import Manifest
from kempner.data.files.index import fingerprint, read_index
from kempner.data.files.text import TextTokenizer
from kempner.run.process.exit_codes import DataError
from kempner.run.record.recorded_config import recorded_config
from kempner.run.record.run_dir import RunDirectory

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
    run = _run_of(directory, checkpoint)
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


def _run_of(directory: Path, checkpoint: Path) -> RunDirectory:
    """The directory of the run: as the user called it, or where the checkpoint lies by default."""
    named, around = RunDirectory(directory), RunDirectory(checkpoint.resolve().parent.parent)
    return around if around.config.is_file() and not named.config.is_file() else named
