"""The manifest: a checkpoint exists if and only if this file exists and is intact.

`manifest.json` has the train state, which is all of a run's state outside of tensors, and lists
every other file of the checkpoint: a small file with the xxh3_128 of its bytes, a data file with
its rank's sidecar (`sums-<rank>.json`), which holds an xxh3_64 for each block, so that a reader can
verify just the range that it needs.

The manifest is stored in one canonical form (sorted keys, two spaces, a final newline) and contains
a checksum of itself, which detects any flipped bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

import xxhash

from kempner.checkpoint.format.names import MANIFEST
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import read_filled, storage_waits


@dataclass(frozen=True)
class Rollback:
    """At step `at` the run was found to have diverged, and rolled back to step `to`. The samples at
    positions [`start`, `end`) of the endless order, from that checkpoint on, are skipped since."""

    at: int
    to: int
    start: int
    end: int


@dataclass(frozen=True)
class TrainState:
    """The state of a run outside of tensors: `step` completed steps, `cursor`, the next position in
    the endless order of samples, and `tokens` trained on. `losses` are those of the last normal
    steps, the newest last, with which new ones are compared; `rollbacks` lists all rollbacks so
    far. `checked` is the last step that other ranks have computed again, with the same bits."""

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    losses: tuple[float, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    checked: int | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; ignores other fields. Raises `KeyError` or
        `TypeError` if fields are missing or wrong."""
        return cls(
            step=fields["step"],
            cursor=fields["cursor"],
            tokens=fields["tokens"],
            losses=tuple(fields.get("losses", ())),
            rollbacks=tuple(Rollback(**rollback) for rollback in fields.get("rollbacks", ())),
            checked=fields.get("checked"),
        )

    def to_fields(self) -> dict[str, Any]:
        """Plain JSON; `checked` only where it is known."""
        absent = {"checked"} if self.checked is None else set[str]()
        return {name: value for name, value in asdict(self).items() if name not in absent}


FORMAT: Final = 1
NO_ATTEMPT: Final = 0
"""The attempt in the names and the manifest of what belongs to no attempt of the run: an import."""
BLOCK_BYTES: Final = 1 << 20
_SIDECAR = re.compile(r"sums-(\d{5,})\.json")


@dataclass(frozen=True)
class FileEntry:
    """One file: its length in bytes, and either the checksum of the whole (`xxh3_128`) or the name
    of the sidecar with its block checksums (`sums`)."""

    bytes: int
    xxh3_128: str | None = None
    sums: str | None = None


@dataclass(frozen=True)
class FileSums:
    """The entry of a data file in a sidecar: its length, and an xxh3_64 of every block, in
    order."""

    bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """The origin of a checkpoint, which need not fit at a resume: `config_hash`, the digest of the
    whole configuration, `host`, what bit-identity depends on (device, threads, processor), and
    software `versions`. Empty where unknown."""

    config_hash: str = ""
    host: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Base:
    """The checkpoint in the same folder that has the weights beside which an adapter is trained:
    its step, and the digest of its data."""

    step: int
    digest: str


@dataclass(frozen=True)
class Identity:
    """What must fit between a checkpoint and the run that resumes from it.

    `world` is the number of ranks, `mesh` their device mesh by dimension; `data_fingerprint` and
    `seed` determine the order of the samples; `model` is the resolved model section, `optimizer`
    the name of the saved optimizer. An imported checkpoint has few of these: fields that are None
    or empty are not compared. A checkpoint with an `adapter` (`Adapter.fixed`)
    holds that and its optimizer's state only; the model's own weights are in `base`.
    """

    world: int
    mesh: Mapping[str, int]
    seed: int | None
    data_fingerprint: str | None
    model: Mapping[str, Any]
    optimizer: str | None = "adamw"
    origin: Origin = Origin()
    adapter: Mapping[str, Any] | None = None
    base: Base | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Back from what `to_fields` gave. Raises `KeyError` or `TypeError` for something else."""
        base = fields.get("base")
        known = {"origin": Origin(**fields["origin"]), "base": base and Base(**base)}
        return cls(**{**fields, **known})

    def to_fields(self) -> dict[str, Any]:
        """Plain JSON; of what most checkpoints lack, only what is set."""
        absent = {name for name in ("adapter", "base") if getattr(self, name) is None}
        return {name: value for name, value in asdict(self).items() if name not in absent}


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its tensors. `attempt` is the number of the attempt that
    saved it, `created` is Unix time in seconds."""

    train_state: TrainState
    identity: Identity
    attempt: int
    created: float
    files: Mapping[str, FileEntry]


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest, checksum included."""
    listed = {
        name: {key: value for key, value in asdict(entry).items() if value is not None}
        for name, entry in manifest.files.items()
    }
    fields: dict[str, Any] = {
        "format": FORMAT,
        **manifest.train_state.to_fields(),
        "identity": manifest.identity.to_fields(),
        "attempt": manifest.attempt,
        "created": manifest.created,
        "files": listed,
    }
    return _canonical(fields | {"checksum": _checksum(fields)})


def decode(content: bytes, where: Path) -> Manifest:
    """Parse a manifest. Raises `DataError`, naming `where`, unless every byte is as written."""
    try:
        fields = json.loads(content)
        checksum = fields.pop("checksum")
        if checksum != _checksum(fields) or content != _canonical(fields | {"checksum": checksum}):
            raise DataError(f"{where} is damaged: its checksum does not match")
        if fields["format"] != FORMAT:
            raise DataError(
                f"{where} has format {fields['format']}, this kempner reads format {FORMAT}"
            )
        return Manifest(
            train_state=TrainState.from_fields(fields),
            identity=Identity.from_fields(fields["identity"]),
            attempt=fields["attempt"],
            created=fields["created"],
            files={_within(name): FileEntry(**e) for name, e in fields["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is damaged: it is not a manifest ({error})") from error


def _within(name: str) -> str:
    path = PurePosixPath(name)
    if str(path) != name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a file of this folder")
    return name


def read(checkpoint: Path, worked: bool = False) -> Manifest:
    """The manifest of a checkpoint folder. Raises `DataError` if it is missing or damaged, and as
    `StorageWaits.retry`, for which `worked` means that it is known to exist."""
    path = checkpoint / MANIFEST
    try:
        return decode(storage_waits().retry(partial(read_filled, path), worked), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def digest(manifest: Manifest) -> str:
    """A digest that identifies a checkpoint, also after it was renamed."""
    return whole_sum(encode(manifest))


def data_digest(manifest: Manifest) -> str:
    """What tells a checkpoint's tensors from others, whenever and by whatever they were written."""
    sums = {name: e.xxh3_128 for name, e in manifest.files.items() if _SIDECAR.fullmatch(name)}
    return whole_sum(_canonical(sums))


def sidecar_name(rank: int) -> str:
    return f"sums-{rank:05d}.json"


def rank_of(name: str, entry: FileEntry) -> int | None:
    """The rank that wrote a file of a checkpoint; None for a file of all ranks."""
    match = _SIDECAR.fullmatch(entry.sums or name)
    return int(match[1]) if match else None


def encode_sidecar(files: Mapping[str, FileSums]) -> bytes:
    """The canonical bytes of a sidecar: length and block checksums by file name."""
    listed = {name: {"bytes": s.bytes, "blocks": list(s.blocks)} for name, s in files.items()}
    return _canonical({"format": FORMAT, "block_bytes": BLOCK_BYTES, "files": listed})


def decode_sidecar(content: bytes, where: Path) -> tuple[int, dict[str, FileSums]]:
    """The block size in bytes, and the checksums by file name. Raises `DataError` if damaged."""
    try:
        fields = json.loads(content)
        files = {
            name: FileSums(bytes=entry["bytes"], blocks=tuple(entry["blocks"]))
            for name, entry in fields["files"].items()
        }
        return int(fields["block_bytes"]), files
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is damaged: it contains no block checksums ({error})") from error


def sum_file(path: Path) -> FileSums:
    blocks, length = [], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            blocks.append(xxhash.xxh3_64_hexdigest(block))
            length += len(block)
    return FileSums(bytes=length, blocks=tuple(blocks))


def whole_sum(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def entry_of(content: bytes | memoryview) -> FileEntry:
    """The manifest's entry of a small file."""
    return FileEntry(len(content), xxh3_128=whole_sum(content))


def _checksum(fields: Mapping[str, Any]) -> str:
    return whole_sum(_canonical(fields))


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
