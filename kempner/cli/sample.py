"""`kempner sample`: text from the model of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import islice
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.store.retention import locate, pick, reading_at
from kempner.cli.checkpoint.inspect import Folder
from kempner.cli.checkpoint.trained_on import (
    Data,
    TrainedOn,
    check_described,
    find_text,
    load_model,
    recorded_shape,
)
from kempner.cli.progress import busy
from kempner.run.process.exit_codes import UsageError


def register(app: typer.Typer) -> None:
    app.command()(sample)


def sample(
    directory: Folder,
    prompt: Annotated[str, typer.Option(help="How the text begins.")],
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to add, unless the document ends before.")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: always the likeliest token; 1: as the model is.")
    ] = 0.7,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Sample from the likeliest tokens with this probability together."
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text on a machine."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; `latest` by default.")] = None,
    data: Data = None,
) -> None:
    """Print what the model of a run makes of a prompt, as it comes; on a GPU if there is one."""
    if not math.isfinite(temperature):
        raise UsageError(f"--temperature {temperature} is not a number to divide by")
    chosen = pick(*locate(directory), step)
    with reading_at(chosen, lambda error: None):  # it is read once: a vanished file will be named
        manifest = read(chosen)
        check_described(chosen, manifest)
        text = find_text(directory, chosen, manifest, data)
        shape = recorded_shape(chosen, manifest, text.seq_len)
        ids = _encoded(prompt, text)
        with busy("importing torch"):
            import torch

            from kempner.model.generate import generate

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with busy(f"loading {chosen.name}"):
            model = load_model(chosen, manifest, shape, text.dtype, device)

    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    tokens = generate(
        model,
        torch.tensor(ids, device=device),
        context=text.seq_len,
        temperature=temperature,
        top_k=top_k or None,
        top_p=top_p,
        generator=generator,
    )
    _print(prompt, _pieces(text, ids, islice(tokens, max_tokens)))


def _encoded(prompt: str, text: TrainedOn) -> list[int]:
    """The prompt's tokens. Raises `UsageError` if there are none, or too many."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are no text
        raise UsageError("--prompt is not valid UTF-8") from error
    ids = text.tokenizer.encode(prompt)
    if not ids:
        raise UsageError("--prompt is empty: give the model a few words to go on from")
    if len(ids) > text.seq_len:
        raise UsageError(
            f"--prompt has {len(ids)} tokens, and the model was trained with {text.seq_len} at "
            "once (train.seq_len): shorten it"
        )
    return ids


def _pieces(text: TrainedOn, ids: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text that the tokens add, as soon as each is whole, up to the end of the document."""
    decoder = text.tokenizer.decoder(ids)
    for token in tokens:
        if token == text.tokenizer.eot:
            break
        yield decoder.add(token)
    yield decoder.rest()


def _print(prompt: str, pieces: Iterator[str]) -> None:
    """Print as it comes. On a terminal nothing may steer it: a young model writes any byte."""
    on_terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding does not have
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(_harmless(piece) if on_terminal else piece, end="", flush=True)
    print()


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
