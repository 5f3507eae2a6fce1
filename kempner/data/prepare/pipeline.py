"""Prepares token files from text, in parallel, resumable at any point.

    OUT/index.json                   written last; what it lists is complete
    OUT/tokenizer.json               copy of the tokenizer; not there for bytes
    OUT/tokenizer_config.json        of chats: their template, and the special tokens
    OUT/shard-00000.tokens           renamed to this name when it is durable
    OUT/.progress/inputs.json        what is being prepared
    OUT/.progress/shard-00000.json   written when that shard is in place
    OUT/.progress/*.<pid>            being written

A shard depends on its unit of text and on the tokenizer alone: any number of workers, killed and
started again any number of times, gives the same bytes. `.progress` is removed at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from xxhash import xxh3_128_hexdigest

from kempner.data.files.chat_template import CHAT_FILE
from kempner.data.files.index import (
    INDEX_FILE,
    MOST_FLAGGED,
    TOKENIZER_FILE,
    Checksum,
    Index,
    Kind,
    Shard,
    StrictRecord,
    read_index,
)
from kempner.data.prepare.documents import added_up, check_share
from kempner.data.prepare.inputs import InputFiles, SourceFile, find_files
from kempner.data.prepare.process_pool import Task, run_all
from kempner.data.prepare.shard_builder import (
    BuiltShard,
    ChatRecipe,
    Recipe,
    build,
    confirm,
    prepared_differently,
    put,
)
from kempner.data.prepare.sources import Unit, plan_units
from kempner.data.prepare.tokenizers import BYTE, find_chat_tokenizer, find_tokenizer
from kempner.run.process.exit_codes import DataError, UsageError, cannot_write

OnProgress = Callable[[int, int], None]
"""Told (bytes of the files done, bytes in all) at the start and as it goes on."""

_WORTH_A_PROCESS = 2**20  # bytes; less is done before a process has started
_INPUTS_FILE = "inputs.json"


class _Inputs(StrictRecord):
    first: str
    files: int
    names: Checksum


@dataclass(frozen=True)
class PreparedData:
    index: Index
    kept: int  # shards that were in place, and intact, before
    found: InputFiles
    was_finished: bool  # there was nothing to do but to verify
    first_bad: str = ""
    """The first line that was left out, and why; only of those that the index counts."""


def prepare(
    out: Path,
    files: Sequence[Path],
    *,
    tokenizer: str = BYTE,
    eot: str | None = None,
    text_key: str = "text",
    kind: Kind = "text",
    seq_len: int = 0,
    max_bad_share: float = 0.0,
    workers: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> PreparedData:
    """Write the tokens of text files and tables, or folders of them, to the directory `out`.

    The tokenizer's end of a text follows every document; chats are packed into rows of `seq_len`
    tokens. Lines that hold no text are left out, up to a share of all lines. Started again with the
    same arguments it keeps what is complete, or, if all is, verifies it. `workers` processes do it,
    or without them this one. Raises UsageError for arguments that make no sense or do not match
    what `out` holds, DataError for text that cannot be read, a full disk and damaged token files.
    """
    found = find_files(files, records=kind != "text")
    recipe = _recipe(out, tokenizer, eot, text_key, kind, seq_len)
    units = plan_units(found.files, recipe.tokenizer, recipe.columns)
    if sum(unit.size for unit in units) < _WORTH_A_PROCESS:
        workers = 0
    if was_finished := (out / INDEX_FILE).exists():
        index = read_index(out)
        _check_same(recipe, units, index)
        built = _run(partial(confirm, recipe, index), units, workers, on_progress)
        lines = added_up(each.lines for each in built)
    else:
        _claim(recipe, found.files)
        built = _run(partial(build, recipe), units, workers, on_progress)
        lines = added_up(each.lines for each in built)
        check_share(lines, max_bad_share)
        index = _finish(recipe, [each.shard for each in built])
    shutil.rmtree(recipe.progress, ignore_errors=True)  # the index says that nothing needs it
    kept = sum(each.kept for each in built)
    return PreparedData(index, kept, found, was_finished, str(lines.first or ""))


def _recipe(
    out: Path, name: str, eot: str | None, text_key: str, kind: Kind, seq_len: int
) -> Recipe:
    if kind == "text":
        return Recipe(out, find_tokenizer(name, eot), text_key)
    tokenizer, template = find_chat_tokenizer(name, eot)
    if tokenizer.vocab_size > MOST_FLAGGED:
        raise UsageError(f"{name} has {tokenizer.vocab_size} token ids, more than chats can have")
    return Recipe(out, tokenizer, text_key, ChatRecipe(kind, seq_len, template))


def _run(
    task: Task[Unit, BuiltShard], units: Sequence[Unit], workers: int, on_progress: OnProgress
) -> list[BuiltShard]:
    """The outcome of every unit, in the order of the units."""
    done, total = 0, sum(unit.size for unit in units)
    parts = [0] * len(units)

    def count(number: int, size: int) -> None:
        nonlocal done
        # A unit that does not stand up to verification is done twice, but not counted twice.
        size = min(size, units[number].size)
        done += size - parts[number]
        parts[number] = size
        on_progress(done, total)

    on_progress(0, total)
    return run_all(task, units, workers, count)


def _check_same(recipe: Recipe, units: Sequence[Unit], index: Index) -> None:
    """UsageError if a finished directory was made with another tokenizer or from other files."""
    if (index.tokenizer, index.eot) != (recipe.tokenizer.identity, recipe.tokenizer.eot):
        raise prepared_differently(
            recipe.out, f"with another tokenizer ({index.tokenizer.kind}, eot={index.eot})"
        )
    chats = recipe.chats
    wanted = (
        (chats.kind, chats.seq_len, chats.template.fingerprint) if chats else ("text", None, "")
    )
    if (index.kind, index.seq_len, index.template) != wanted:
        rows = f" in rows of {index.seq_len} tokens" if index.seq_len else ""
        other = "" if index.template in ("", wanted[2]) else " by another chat template"
        raise prepared_differently(recipe.out, f"as {index.kind}{rows}{other}")
    if len(index.shards) != len(units):
        raise prepared_differently(recipe.out, "from other text (of another length)")


def _claim(recipe: Recipe, files: Sequence[SourceFile]) -> None:
    """Make `out` ours. UsageError if it is something else, or an attempt at other files."""
    inputs = _Inputs(
        first=files[0].name,
        files=len(files),
        names=xxh3_128_hexdigest(json.dumps([file.name for file in files]).encode()),
    )
    before = _read_inputs(recipe)
    if before == inputs:
        return
    if before is not None:
        raise UsageError(
            f"{recipe.out} contains an unfinished preparation of other files ({before.files}, the "
            f"first is {before.first}): name the same, choose another --out, or remove it first"
        )
    try:
        recipe.out.mkdir(parents=True, exist_ok=True)
        if not recipe.progress.exists() and any(recipe.out.iterdir()):
            raise UsageError(f"{recipe.out} is not empty: choose a new directory for --out")
        recipe.progress.mkdir(exist_ok=True)
        put(recipe, recipe.progress / _INPUTS_FILE, inputs.model_dump_json().encode())
    except OSError as error:
        raise cannot_write(f"--out {recipe.out}", error) from error


def _read_inputs(recipe: Recipe) -> _Inputs | None:
    try:
        return _Inputs.model_validate_json((recipe.progress / _INPUTS_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise UsageError(
            f"{recipe.progress / _INPUTS_FILE} is damaged: remove {recipe.out} first"
        ) from error


def _finish(recipe: Recipe, shards: Sequence[Shard]) -> Index:
    """Write the index, which makes the directory a finished one."""
    tokens, chats = sum(shard.tokens for shard in shards), recipe.chats
    if not sum(shard.documents for shard in shards):
        empty = "all documents are empty" if chats is None else _nothing_learned(shards)
        raise DataError(f"{empty}: nothing to prepare")
    index = Index(
        format="kempner-tokens",
        version=1,
        dtype=recipe.dtype,
        vocab_size=recipe.tokenizer.vocab_size,
        eot=recipe.tokenizer.eot,
        tokenizer=recipe.tokenizer.identity,
        tokenizer_name=recipe.tokenizer.name,
        tokens=tokens,
        documents=sum(shard.documents for shard in shards),
        shards=list(shards),
        kind=chats.kind if chats else "text",
        seq_len=chats.seq_len if chats else None,
        template=chats.template.fingerprint if chats else "",
    )
    listed = {recipe.out / shard.file for shard in shards}
    try:
        for stray in set(recipe.out.glob("shard-*.tokens")) - listed:
            stray.unlink()  # of an earlier attempt, when there was more text
        if recipe.tokenizer.definition:
            put(recipe, recipe.out / TOKENIZER_FILE, recipe.tokenizer.definition.encode())
        if chats is not None:
            put(recipe, recipe.out / CHAT_FILE, chats.template.settings.encode())
        put(recipe, recipe.out / INDEX_FILE, index.to_bytes())
    except OSError as error:
        advice = "run the same command again when that is fixed"
        raise cannot_write(recipe.out / INDEX_FILE, error, advice) from error
    return index


def _nothing_learned(shards: Sequence[Shard]) -> str:
    if any(shard.left_out for shard in shards):
        return "no chat has an answer, and no pair both of them, within --seq-len tokens"
    return "there is no chat in these files"
