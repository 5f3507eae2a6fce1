"""`kempner prepare`: turns text into token files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kempner.cli.progress import bar, busy
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.observe.progress_bar import SteadyConsole

if TYPE_CHECKING:
    from kempner.data.files.index import Kind
    from kempner.data.prepare.pipeline import PreparedData

app = typer.Typer(rich_markup_mode=None)


FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Texts, .jsonl and .parquet files, also .gz and .zst, or folders of them.",
    ),
]
OutOption = Annotated[
    Path, typer.Option(help="Directory to write; new, or from an interrupted run of this command.")
]
TokenizerOption = Annotated[
    str,
    typer.Option(
        metavar="byte|PATH",
        help="Plain bytes, or a tokenizer.json; for chats with its template beside it, or a folder "
        "with both.",
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Processes; one per available core by default.")
]
TextKeyOption = Annotated[
    str, typer.Option(metavar="KEY", help="Key, or column, of the text in .jsonl, or .parquet.")
]
MaxBadShareOption = Annotated[
    float,
    typer.Option(
        min=0, max=1, metavar="SHARE", help="Largest share of lines without text to leave out."
    ),
]
EotOption = Annotated[
    str | None, typer.Option(metavar="TOKEN", help="The tokenizer's end-of-document token.")
]
ChatsOption = Annotated[
    bool, typer.Option("--chats", help="Prepare chats, by the tokenizer's chat template.")
]
PreferencesOption = Annotated[
    bool, typer.Option("--preferences", help="Prepare pairs of a chosen and a rejected answer.")
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(
        min=2, metavar="N", help="Tokens of the rows that chats are packed into: train.seq_len."
    ),
]


@app.command("prepare")
def _prepare(
    files: FilesArgument,
    out: OutOption,
    tokenizer: TokenizerOption = "byte",
    workers: WorkersOption = None,
    text_key: TextKeyOption = "text",
    max_bad_share: MaxBadShareOption = 0.001,
    eot: EotOption = None,
    chats: ChatsOption = False,
    preferences: PreferencesOption = False,
    seq_len: SeqLenOption = None,
) -> ExitCode:
    """Turn text into token files; after an interruption, run it again to continue."""
    kind = _kind(chats, preferences, seq_len)
    with busy("starting"):
        from kempner.data.prepare.pipeline import prepare

    console = SteadyConsole(stderr=True)
    try:
        with _reporter(console) as on_progress:
            prepared = prepare(
                out,
                files,
                tokenizer=tokenizer,
                eot=eot,
                text_key=text_key,
                kind=kind,
                seq_len=seq_len or 0,
                max_bad_share=max_bad_share,
                workers=workers or len(os.sched_getaffinity(0)),
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        typer.echo(
            "kempner: interrupted; finished files are kept: run the same command again", err=True
        )
        return ExitCode.INTERRUPTED
    typer.echo(_summary(out, prepared))
    return ExitCode.COMPLETED


def _kind(chats: bool, preferences: bool, seq_len: int | None) -> Kind:
    if chats and preferences:
        raise UsageError("give either --chats or --preferences: their rows are not alike")
    kind: Kind = "chats" if chats else "preferences" if preferences else "text"
    if kind != "text" and seq_len is None:
        raise UsageError(f"--{kind} needs --seq-len N, the train.seq_len to be trained with")
    if kind == "text" and seq_len is not None:
        raise UsageError("--seq-len is for --chats: text is cut by train.seq_len when it is read")
    return kind


@contextmanager
def _reporter(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that shows a progress bar on a terminal, elsewhere a line per tenth."""
    printed_tenths = 0

    def tell(done: int, total: int) -> None:
        nonlocal printed_tenths
        if (tenths := 10 * done // total) > printed_tenths:
            printed_tenths = tenths
            console.print(f"preparing: {done:,} of {total:,} bytes", highlight=False)

    with bar(console, "preparing") as update:
        yield update if console.is_terminal else tell


def _summary(out: Path, prepared: PreparedData) -> str:
    index = prepared.index
    empty = sum(shard.empty_documents for shard in index.shards)
    kept = 0 if prepared.was_finished else prepared.kept
    facts = [
        f"{index.tokens:,} tokens",
        count(index.documents, "document"),
        count(len(index.shards), "token file"),
        f"{index.tokenizer.kind} tokenizer of {index.vocab_size:,} tokens in {index.dtype}",
    ]
    if index.seq_len is not None:
        rows = index.tokens // index.seq_len
        facts.append(f"{count(rows, 'row')} of {index.seq_len:,} tokens")
    truncated = sum(shard.truncated for shard in index.shards)
    unanswered = sum(shard.left_out for shard in index.shards)
    bad = sum(shard.bad_lines for shard in index.shards)
    unproven = sum(shard.unproven_cuts for shard in index.shards)
    left_out, twins = prepared.found.left_out, prepared.found.twins
    first_bad = f", first {prepared.first_bad}" if prepared.first_bad else ""
    notes = [
        f"kept from before: {kept:,}" if kept else "",
        f"empty documents skipped: {empty:,}" if empty else "",
        f"bad lines skipped: {bad:,}{first_bad}" if bad else "",
        f"longer than a row, and truncated: {truncated:,}" if truncated else "",
        f"left out, since their answers do not fit into a row: {unanswered:,}"
        if unanswered
        else "",
        f"files skipped because they are not text: {len(left_out):,}, {left_out[0]} first"
        if left_out
        else "",
        f"files that look like copies: {len(twins):,}, {twins[0][1]} of {twins[0][0]} first"
        if twins
        else "",
        f"places in long documents where a token may differ from those of the whole: {unproven:,}"
        if unproven
        else "",
    ]
    head = "was prepared before, and is intact" if prepared.was_finished else "prepared"
    return "; ".join([f"{out} {head}: {', '.join(facts)}", *filter(None, notes)])
