"""Opens what is compared: a checkpoint of kempner, a stock one, or a folder of safetensors files.

Each gives its tensors one at a time, under names that the other side can have, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from kempner.checkpoint.convert.export import MODEL
from kempner.checkpoint.convert.import_dcp import Foreign
from kempner.checkpoint.convert.safetensors_reader import find_tensors
from kempner.checkpoint.convert.tensor_copy import Source
from kempner.checkpoint.format.contents import Saved
from kempner.run.process.exit_codes import DataError

Read = Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]

SAFETENSORS = "safetensors"
"""The kind of a folder of Hugging Face."""

_TABLES = (f"{MODEL}embed.weight", f"{MODEL}output.weight")
"""The tensors with a row for each token id, and maybe rows of no token after them."""


@dataclass(frozen=True)
class Side:
    """What is compared. `kind` says in a word or two what it is.

    `read` gives whole tensors by their names in `tensors`, in the order that it is given, and holds
    256 MiB of them, or the largest one. `rows` is how many rows of a table stand for tokens, where
    that is known.
    """

    path: Path
    kind: str
    tensors: Mapping[str, Saved]
    read: Read
    rows: Mapping[str, int] = field(default_factory=dict)


def own(checkpoint: Path) -> Side:
    """A checkpoint of kempner; each block is verified when it is read."""
    source = Source.open(checkpoint)
    tokens = source.manifest.identity.model.get("vocab_size")
    rows = dict.fromkeys(_TABLES, tokens) if isinstance(tokens, int) else {}
    return Side(checkpoint, "kempner", source.contents.tensors, source.read, rows)


def stock(path: Path) -> Side:
    """A checkpoint that `torch.distributed.checkpoint` wrote, under kempner's names."""
    foreign = Foreign.open(path)
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in foreign.specs()}
    return Side(path, "torch.distributed.checkpoint", tensors, foreign.read)


def safetensors(folder: Path) -> Side:
    """A folder as Hugging Face has them, under its own names."""
    located = find_tensors(folder)
    if not located:
        raise DataError(f"{folder} has no tensors")
    tensors = {name: Saved(found.shape, found.dtype) for name, found in located.items()}
    return Side(
        folder,
        SAFETENSORS,
        tensors,
        lambda names: ((name, located[name].read()) for name in names),
    )


def model_of(side: Side) -> Side:
    """The model's tensors alone."""
    return without(side, {name for name in side.tensors if not name.startswith(MODEL)})


def without(side: Side, names: Collection[str]) -> Side:
    """All tensors but these."""
    left = {name: saved for name, saved in side.tensors.items() if name not in names}
    return replace(side, tensors=left)


def renamed(side: Side, names: Mapping[str, str]) -> Side:
    """A side whose tensors are called as `names` says, by their names until now; others stay."""
    before = {names.get(name, name): name for name in side.tensors}
    tensors = {name: side.tensors[theirs] for name, theirs in before.items()}

    def read(wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = list(wanted)
        found = side.read([before[name] for name in wanted])
        return ((name, next(found)[1]) for name in wanted)  # no tensor is kept here

    return replace(side, tensors=tensors, read=read)
