"""`kempner eval`: the loss of a run's model on held-out data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import Manifest, read
from kempner.checkpoint.store.retention import locate, pick, reading_at
from kempner.cli.checkpoint.trained_on import (
    check_described,
    load_model,
    recorded_shape,
    run_of_checkpoint,
)
from kempner.cli.insight.target import run_of
from kempner.cli.progress import busy
from kempner.cli.usage import usable_path
from kempner.data.files.index import read_index
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.record.recorded_config import recorded_config


def register(app: typer.Typer) -> None:
    app.command("eval")(_eval)


@dataclass(frozen=True)
class HeldOut:
    """What a run is evaluated on, and how much of it at once, in sequences of `seq_len` tokens."""

    data: Path
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    max_batches: int
    dtype: str


def _eval(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|JOBID|DIR",
            help="A run's directory, name or Slurm job; a checkpoint folder, or one checkpoint.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Held-out tokens; by default the run's own."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; `latest` by default.")] = None,
    max_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Global batches to read; by default the run's eval.max_batches."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print loss and perplexity of a run's checkpoint on held-out data; on a GPU if there is one.

    As the run itself does every `eval.interval` steps: the same data, in the same batches.
    """
    there = usable_path(Path(target))
    directory = there if there.exists() else run_of(target).path
    chosen = pick(*locate(directory), step)
    with reading_at(chosen, lambda error: None):
        manifest = read(chosen)
        check_described(chosen, manifest)
        held_out = _held_out(directory, chosen, manifest, data, max_batches)
        loss, tokens = _evaluate(chosen, manifest, held_out)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    at = manifest.train_state.step
    if as_json:
        known = {"step": at, "loss": loss, "perplexity": perplexity, "tokens": tokens}
        typer.echo(json.dumps({**known, "data": str(held_out.data)}))
    else:
        typer.echo(
            f"step {at}: loss {loss:.4f}, perplexity {perplexity:,.2f} "
            f"({tokens:,} tokens of {held_out.data})"
        )


def _held_out(
    directory: Path, checkpoint: Path, manifest: Manifest, data: Path | None, limit: int | None
) -> HeldOut:
    """By the run's configuration. Raises `UsageError` if it names no held-out data."""
    run = run_of_checkpoint(directory, checkpoint)
    config = recorded_config(run, manifest.attempt)
    section, train = config.get("eval", {}), config.get("train", {})
    found = data or section.get("dataset_path")
    if found is None:
        raise UsageError(
            f"{run.path} has no held-out data (eval.dataset_path): name some with --data DIR, as "
            "`kempner prepare` writes it"
        )
    try:
        return HeldOut(
            Path(found),
            int(train["seq_len"]),
            int(train["global_batch_size"]),
            int(train["micro_batch_size"]),
            limit or int(section.get("max_batches", 8)),
            str(train.get("dtype", "auto")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{run.config} does not say how {checkpoint.name} was trained; name the directory of "
            "its run"
        ) from error


def _check_tokens(checkpoint: Path, manifest: Manifest, data: Path) -> None:
    ids, known = read_index(data).vocab_size, manifest.identity.model["vocab_size"]
    if ids > known:
        raise DataError(
            f"{data} has {ids} token ids, the model of {checkpoint.name} {known}: prepare it with "
            "the tokenizer of the run"
        )


def _evaluate(checkpoint: Path, manifest: Manifest, held_out: HeldOut) -> tuple[float, int]:
    """The loss in nats per token, and how many tokens that were."""
    shape = recorded_shape(checkpoint, manifest, held_out.seq_len)
    _check_tokens(checkpoint, manifest, held_out.data)
    with busy("importing torch"):
        import torch

        from kempner.data.files.token_file import Corpus
        from kempner.training.observe.evaluation import evaluate_alone

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with busy(f"evaluating {checkpoint.name}"):
        return evaluate_alone(
            load_model(checkpoint, manifest, shape, held_out.dtype, device),
            Corpus.open(held_out.data),
            device,
            seq_len=held_out.seq_len,
            global_batch_size=held_out.global_batch_size,
            micro_batch_size=held_out.micro_batch_size,
            max_batches=held_out.max_batches,
        )
