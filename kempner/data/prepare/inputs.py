"""Finds the files to prepare, and refuses what is no text before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from xxhash import xxh3_128

from kempner.data.prepare.packed import UnpackError, open_packed
from kempner.run.process.exit_codes import UsageError, cannot_read

Format = Literal["text", "jsonl", "parquet"]

_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_PACKINGS = (".gz", ".zst")
_REFUSED = {
    **dict.fromkeys((".csv", ".tsv"), "is a table: write each text as a line of a .jsonl file"),
    ".json": "may be one JSON document: make it a .jsonl file, one object with a text per line",
    **dict.fromkeys(
        (".bz2", ".xz", ".7z", ".zip", ".tar", ".tgz", ".arrow", ".feather", ".npy", ".docx"),
        "is not plain text: unpack or convert it first",
    ),
}
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16; UTF-32's have zero bytes
_SAMPLE = 64 * 2**10
_WORTH_COMPARING = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file to prepare. Its name is what remains of it in the index: without the folder."""

    path: Path
    name: str
    size: int  # bytes on disk
    format: Format = "text"
    packing: str = ""

    @property
    def one_document(self) -> bool:
        """The whole file, rather than each of its lines or rows."""
        return self.format == "text"


@dataclass(frozen=True)
class InputFiles:
    files: tuple[SourceFile, ...]
    left_out: tuple[Path, ...]  # what lies in the named folders and is no text
    twins: tuple[tuple[Path, Path], ...] = ()  # large files that look like copies of an earlier one


def find_files(named: Sequence[Path], records: bool = False) -> InputFiles:
    """The named files and, sorted by name, the text files below the named folders. Links to folders
    are not followed. Raises UsageError, naming it, if something is missing, is no text, cannot be
    read or comes twice, or a folder holds no text. `records` is whether only lines of JSON and
    tables are of use."""
    files: list[SourceFile] = []
    left_out: list[Path] = []
    try:
        for path in named:
            if path.is_dir():
                inside, others = _below(path, records)
                files += inside
                left_out += others
            else:
                files.append(_named_file(path, records))
        _refuse_twice(files)
        if not sum(file.size for file in files):
            raise UsageError(
                f"there is no text in {', '.join(map(str, named))}: nothing to prepare"
            )
        return InputFiles(tuple(files), tuple(left_out), tuple(_probable_duplicates(files)))
    except OSError as error:
        raise cannot_read(error.filename, error) from error


def _named_file(path: Path, records: bool) -> SourceFile:
    if not path.exists():
        raise UsageError(f"{path} does not exist: name text files, .jsonl files or folders of them")
    if not path.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    file = _classified(path, path.name)
    inner = Path(path.stem if file.packing else path.name).suffix.lower()
    refusal = _REFUSED.get(inner) or _not_text(file)
    if not refusal and records and file.one_document:
        refusal = "holds text, not chats: name .jsonl or .parquet files"
    if refusal:
        raise UsageError(f"{path} {refusal}")
    return file


def _below(folder: Path, records: bool) -> tuple[list[SourceFile], list[Path]]:
    wanted: list[SourceFile] = []
    left_out: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse_to_skip):
        left_out += [path for name in folders if (path := Path(root, name)).is_symlink()]
        for path in (Path(root, name) for name in names):
            if not _looks_like_text(path) or not path.is_file():
                left_out.append(path)
                continue
            file = _classified(path, path.relative_to(folder).as_posix())
            if _not_text(file) or (records and file.one_document):
                left_out.append(path)
            else:
                wanted.append(file)
    if not wanted:
        kinds = ", ".join(sorted(k for k in _FORMATS if not records or _FORMATS[k] != "text"))
        raise UsageError(
            f"folder {folder} contains no text file ({kinds}, or these with .gz or .zst): "
            "name the files"
        )
    return sorted(wanted, key=lambda file: file.name), sorted(left_out)


def _refuse_to_skip(error: OSError) -> None:
    raise error  # os.walk would silently skip the folder


def _looks_like_text(path: Path) -> bool:
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower() if suffix in _PACKINGS else suffix) in _FORMATS


def _classified(path: Path, name: str) -> SourceFile:
    # The name goes into JSON, which holds no bytes that are not text.
    printable = os.fsencode(name).decode(errors="backslashreplace")
    file = SourceFile(path, printable, path.stat().st_size)
    suffix = path.suffix.lower()
    if suffix in _PACKINGS:
        file = replace(file, packing=suffix)
        suffix = Path(path.stem).suffix.lower()
    return replace(file, format=_FORMATS.get(suffix, "text"))


def _not_text(file: SourceFile) -> str:
    """What is wrong with the beginning of a file; empty if nothing is. Raises UsageError if it
    cannot be unpacked."""
    if file.size == 0:
        return ""
    if file.format == "parquet":
        return "is packed parquet: unpack it first" if file.packing else ""
    try:
        with open(file.path, "rb") as raw, open_packed(raw, file.packing, file.path) as content:
            start = content.read(_SAMPLE)
    except UnpackError as error:
        raise UsageError(f"{file.path} {error}") from error
    if start.startswith(_BYTE_ORDER_MARKS):
        return "is UTF-16: convert it to UTF-8 first"
    if start.startswith(b"%PDF-"):
        return "is a PDF: convert it to text first"
    if (zero := start.find(b"\0")) >= 0:
        return f"is binary (its byte {zero + 1} is zero): name text files"
    return ""


def _refuse_twice(files: Sequence[SourceFile]) -> None:
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        stat = file.path.stat()
        other = seen.setdefault((stat.st_dev, stat.st_ino), file.path)
        if other is not file.path:
            raise UsageError(
                f"{file.path} comes twice"
                + ("" if other == file.path else f", also as {other}")
                + ": name every file once"
            )


def _probable_duplicates(files: Sequence[SourceFile]) -> Iterator[tuple[Path, Path]]:
    """Files of a megabyte or more and of one size, alike at the start, the middle and the end."""
    by_size: dict[int, list[SourceFile]] = {}
    for file in files:
        if file.size >= _WORTH_COMPARING:
            by_size.setdefault(file.size, []).append(file)
    for alike in by_size.values():
        seen: dict[bytes, Path] = {}
        for file in alike if len(alike) > 1 else ():
            first = seen.setdefault(_sample_digest(file), file.path)
            if first is not file.path:
                yield first, file.path


def _sample_digest(file: SourceFile) -> bytes:
    digest = xxh3_128()
    with open(file.path, "rb") as content:
        for start in (0, file.size // 2, file.size - _SAMPLE):
            content.seek(start)
            digest.update(content.read(_SAMPLE))
    return digest.digest()
