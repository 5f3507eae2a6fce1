"""What is found of the data that a configuration names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kempner.data.files.index import INDEX_FILE, Index, find_data, tokenizer_file
from kempner.run.process.exit_codes import RunError

_AT_ONCE = 16
"""Token files that are opened at a time."""


@dataclass(frozen=True)
class DataSet:
    """A prepared folder, which the key `key` names. `index` is None where it cannot be used, of
    which `trouble` says why; `unreadable` is about its token files, `tokenizer` about the tokenizer
    beside them: sentences, empty if all is well."""

    key: str
    folder: str
    index: Index | None
    trouble: str = ""
    unreadable: str = ""
    tokenizer: str = ""

    @property
    def marker(self) -> str:
        """The file by which copies of it are compared."""
        return str((Path(self.folder) / INDEX_FILE).absolute())


def find_data_set(section: str, folder: str) -> DataSet:
    """Look at the folder that `<section>.dataset_path` names; every token file is opened."""
    key = f"{section}.dataset_path"
    try:
        index = find_data(section, folder)
    except RunError as error:
        return DataSet(key, folder, None, str(error))
    try:
        tokenizer_file(Path(folder))
        tokenizer = ""
    except RunError as error:
        tokenizer = f"{key}={folder}: {error}"
    return DataSet(key, folder, index, "", _unreadable(key, Path(folder), index), tokenizer)


def _unreadable(key: str, folder: Path, index: Index) -> str:
    with ThreadPoolExecutor(_AT_ONCE, "open") as pool:
        found = [
            why for why in pool.map(_try_to_read, (folder / s.file for s in index.shards)) if why
        ]
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"{key}={folder}: {found[0]}{more}; ask the owner for the right to read it"


def _try_to_read(file: Path) -> str:
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.read(1)
    except OSError as error:
        return f"token file {file} cannot be read: {error.strerror}"
    return ""
