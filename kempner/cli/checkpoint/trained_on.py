"""`kempner sample` and `kempner eval`: text and loss of a checkpoint's model, and the data that it
was trained on."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kempner.checkpoint.format.manifest import Manifest, read
from kempner.checkpoint.store.retention import locate, pick, reading_at
from kempner.cli.checkpoint.inspect import Folder
from kempner.cli.progress import busy
from kempner.cli.usage import usable_path
from kempner.data.files.index import Index, fingerprint, read_index
from kempner.data.files.text import TextTokenizer
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.record.recorded_config import recorded_config
from kempner.run.record.run_dir import RunDirectory

if TYPE_CHECKING:
    import torch

    from kempner.model.spec.shape import Shape
    from kempner.model.transformer import Transformer
    from kempner.training.observe.metrics import Scores

app = typer.Typer(rich_markup_mode=None)

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Prepared data whose tokenizer is the model's; by default what the run trained on.",
    ),
]
Step = Annotated[int | None, typer.Option(help="Which checkpoint; `latest` by default.")]


@dataclass(frozen=True)
class TrainedOn:
    """A run's tokenizer, `train.seq_len` and `train.dtype`."""

    tokenizer: TextTokenizer
    seq_len: int
    dtype: str


def find_text(
    directory: Path, checkpoint: Path, manifest: Manifest, data: Path | None
) -> TrainedOn:
    """The tokenizer and settings of a checkpoint's run; `directory` is the user's argument. Raises
    `DataError` if they are missing, or do not fit the model; warns if the data is not what the
    checkpoint was trained on."""
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
    """The run's directory: the user's argument, or the default place above the checkpoint."""
    named, around = RunDirectory(directory), RunDirectory(checkpoint.resolve().parent.parent)
    return around if around.config.is_file() and not named.config.is_file() else named


@contextmanager
def _described(directory: Path, step: int | None) -> Iterator[tuple[Path, Manifest]]:
    """Yield a checkpoint, marked as being read. Raises `DataError` if it does not describe its
    model."""
    chosen = pick(*locate(directory), step)
    with reading_at(
        chosen, lambda error: None
    ):  # read once: an error will name a file that is gone
        manifest = read(chosen)
        if not manifest.identity.model:
            raise DataError(
                f"{chosen} does not say what its model is like: only those that `kempner train` or "
                "`supervise` has trained from a configuration do"
            )
        yield chosen, manifest


def recorded_shape(checkpoint: Path, manifest: Manifest, seq_len: int) -> Shape:
    """The shape of a checkpoint's model. Raises `DataError` if this kempner does not know it."""
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
    from kempner.checkpoint.convert.tensor_copy import Source
    from kempner.model.sharding import build_to_load, compute_dtype
    from kempner.model.spec.adapter import Adapter

    record = manifest.identity.adapter
    adapter = None if record is None else Adapter.recorded(record)
    model = build_to_load(shape, compute_dtype(dtype, device), device, adapter)
    source = Source.open(checkpoint)
    table = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for key, tensor in table.items():
        saved = source.tensors.get(key)
        if saved is None or tuple(saved.shape) != tuple(tensor.shape):
            raise DataError(f"{checkpoint} does not contain {key} as its own description says")
    source.fill(table)
    return model


MaxTokensOption = Annotated[
    int, typer.Option(min=1, help="Tokens to add, unless the document ends before.")
]
TemperatureOption = Annotated[
    float, typer.Option(min=0, help="0: always the likeliest token; 1: as the model is.")
]
TopKOption = Annotated[
    int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
]
TopPOption = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Sample from the likeliest tokens with this probability together."
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text on a machine."),
]


ChatOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="What a user says, to a model that has learned from chats."),
]


@app.command()
def sample(
    directory: Folder,
    prompt: Annotated[str | None, typer.Option(help="How the text begins.")] = None,
    chat: ChatOption = None,
    max_tokens: MaxTokensOption = 400,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 40,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    step: Step = None,
    data: Data = None,
) -> None:
    """Print what the model of a run makes of a prompt, as it comes; on a GPU if there is one."""
    if not math.isfinite(temperature):
        raise UsageError(f"--temperature {temperature} is not a number to divide by")
    if (prompt is None) == (chat is None):
        raise UsageError("give either --prompt, how a text begins, or --chat, what a user says")
    with _described(directory, step) as (chosen, manifest):
        text = find_text(directory, chosen, manifest, data)
        shape = recorded_shape(chosen, manifest, text.seq_len)
        ids = _encoded(prompt, text) if chat is None else _asked(chat, text)
        with busy("importing torch"):
            import torch

            from kempner.model.transformer import generate

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with busy(f"loading {chosen.name}"):
            model = load_model(chosen, manifest, shape, text.dtype, device)

    generator = torch.Generator(device)
    generator.manual_seed(generator.seed() if seed is None else seed)
    begun, how = torch.tensor(ids, device=device), (temperature, top_k or None, top_p)
    tokens = generate(model, begun, *how, context=text.seq_len, generator=generator)
    _print(prompt or "", _pieces(text, ids, islice(tokens, max_tokens)))


def _encoded(prompt: str | None, text: TrainedOn) -> list[int]:
    """The prompt's tokens. Raises `UsageError` if there are none, or too many."""
    ids = text.tokenizer.encode(_valid("--prompt", prompt or ""))
    if not ids:
        raise UsageError("--prompt is empty: give the model a few words to go on from")
    return _not_too_long("--prompt", ids, text)


def _asked(message: str, text: TrainedOn) -> list[int]:
    """The tokens of a chat with this user message. Raises `UsageError` if the run's data has no
    chat template, or there are too many tokens."""
    template = text.tokenizer.chat
    if template is None:
        raise UsageError(
            "--chat is for a model that was trained on chats (kempner prepare --chats): give "
            "--prompt, or name prepared chats with --data"
        )
    try:
        ids = template.ids([{"role": "user", "content": _valid("--chat", message)}], ask=True)
    except ValueError as error:
        raise UsageError(f"--chat: {error}") from error
    return _not_too_long("--chat", ids, text)


def _valid(option: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # undecodable bytes on the command line
        raise UsageError(f"{option} is not valid UTF-8") from error
    return text


def _not_too_long(option: str, ids: list[int], text: TrainedOn) -> list[int]:
    if len(ids) > text.seq_len:
        raise UsageError(
            f"{option} has {len(ids)} tokens, and the model was trained with {text.seq_len} at "
            "once (train.seq_len): shorten it"
        )
    return ids


def _pieces(text: TrainedOn, ids: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the tokens' text, in complete characters, up to the end of the document."""
    decoder = text.tokenizer.decoder(ids)
    for token in tokens:
        if token == text.tokenizer.eot:
            break
        yield decoder.add(token)
    yield decoder.rest()


def _print(prompt: str, pieces: Iterator[str]) -> None:
    """Print pieces as they come; on a terminal without control characters, which a model may
    emit."""
    on_terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # for characters that the terminal's encoding lacks
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(_harmless(piece) if on_terminal else piece, end="", flush=True)
    print()


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@dataclass(frozen=True)
class HeldOut:
    """Held-out data by the names of its sets (empty for `eval.dataset_path` and `--data`), and
    batch sizes in sequences of `seq_len` tokens."""

    data: Mapping[str, Path]
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    max_batches: int
    dtype: str
    beta: float | None = None
    """Of a run that learns from preferences."""


EvalTarget = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR|JOBID|DIR",
        help="A run's directory, name or Slurm job; a checkpoint folder, or one checkpoint.",
    ),
]
HeldOutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Held-out tokens; by default the run's own.")
]
MaxBatchesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Global batches to read; by default the run's eval.max_batches."),
]


@app.command("eval")
def _eval(
    target: EvalTarget,
    data: HeldOutOption = None,
    step: Step = None,
    max_batches: MaxBatchesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print loss, perplexity and, if the data allows it, bits per byte of a run's checkpoint on
    held-out data; of preferences loss and accuracy. Uses a GPU if there is one.

    As the run itself does every `eval.interval` steps: the same data, in the same batches.
    """
    from kempner.cli.insight.target import run_of

    there = usable_path(Path(target))
    directory = there if there.exists() else run_of(target).path
    with _described(directory, step) as (chosen, manifest):
        held_out = _held_out(directory, chosen, manifest, data, max_batches)
        found = _evaluate(chosen, manifest, held_out)
    at = manifest.train_state.step
    if as_json:
        sets = {
            name: {**scores.known(), "tokens": tokens, "data": str(held_out.data[name])}
            for name, (scores, tokens) in found.items()
        }
        first = sets.pop("", {})
        typer.echo(json.dumps({"step": at, **first, **({"sets": sets} if sets else {})}))
        return
    for name, (scores, tokens) in found.items():
        start = f"step {at}{name and f', {name}'}: loss {scores.loss:.4f}"
        if held_out.beta is not None:
            right = "" if scores.accuracy is None else f", accuracy {scores.accuracy:.1%}"
            typer.echo(f"{start}{right} ({tokens:,} pairs of {held_out.data[name]})")
            continue
        bits = scores.bits_per_byte
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        typer.echo(
            f"{start}, perplexity {scores.perplexity:,.2f}{more} "
            f"({tokens:,} tokens of {held_out.data[name]})"
        )


def _held_out(
    directory: Path, checkpoint: Path, manifest: Manifest, data: Path | None, limit: int | None
) -> HeldOut:
    """Held-out data by the run's configuration. Raises `UsageError` if it names none."""
    run = run_of_checkpoint(directory, checkpoint)
    config = recorded_config(run, manifest.attempt)
    section, train = config.get("eval", {}), config.get("train", {})
    found = {"": data or section.get("dataset_path")}
    found |= {} if data is not None else section.get("sets", {})
    named = {name: Path(folder) for name, folder in found.items() if folder is not None}
    if not named:
        raise UsageError(
            f"{run.path} has no held-out data (eval.dataset_path): name some with --data DIR, as "
            "`kempner prepare` writes it"
        )
    try:
        return HeldOut(
            named,
            int(train["seq_len"]),
            int(train["global_batch_size"]),
            int(train["micro_batch_size"]),
            limit or int(section.get("max_batches", 8)),
            str(train.get("dtype", "auto")),
            config.get("preferences", {}).get("beta"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{run.config} does not say how {checkpoint.name} was trained; name the directory of "
            "its run"
        ) from error


def _refuse_another_kind(folder: Path, index: Index, held_out: HeldOut) -> None:
    if (index.kind == "preferences") != (held_out.beta is not None):
        learned = "text or chats" if held_out.beta is None else "preferences"
        raise DataError(
            f"{folder} holds {index.kind}, and the run learns from {learned}: name a directory of "
            "the same kind"
        )


def _evaluate(
    checkpoint: Path, manifest: Manifest, held_out: HeldOut
) -> dict[str, tuple[Scores, int]]:
    """The scores of each set, and its number of tokens, by name."""
    shape = recorded_shape(checkpoint, manifest, held_out.seq_len)
    known = manifest.identity.model["vocab_size"]
    for folder in held_out.data.values():
        index = read_index(folder)
        _refuse_another_kind(folder, index, held_out)
        ids = index.vocab_size
        if ids > known:
            raise DataError(
                f"{folder} has {ids} token ids, the model of {checkpoint.name} {known}: prepare "
                "it with the tokenizer of the run"
            )
    with busy("importing torch"):
        import torch

        from kempner.data.files.token_file import Corpus
        from kempner.training.evaluation import evaluate_alone

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with busy(f"evaluating {checkpoint.name}"):
        model = load_model(checkpoint, manifest, shape, held_out.dtype, device)
        return {
            name: evaluate_alone(
                model,
                Corpus.open(folder),
                device,
                seq_len=held_out.seq_len,
                global_batch_size=held_out.global_batch_size,
                micro_batch_size=held_out.micro_batch_size,
                max_batches=held_out.max_batches,
                beta=held_out.beta,
            )
            for name, folder in held_out.data.items()
        }
