"""Exports a checkpoint to DCP, safetensors or one `torch.save` file.

Every block is checked against its checksum on the way. The result appears under its name when it
is complete and durable; whatever goes wrong before leaves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.convert.tensor_copy import (
    INDEX,
    WHOLE,
    OnBytes,
    Source,
    copy_data_file,
    copy_small_file,
    lay_out_safetensors,
    lay_out_torch,
    length,
    pour,
    shard,
    total,
)
from kempner.checkpoint.format.compact_index import CompactIndex
from kempner.checkpoint.format.contents import Saved
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.tensors.dcp_metadata import metadata_of
from kempner.run.process.durable_io import fsync_directory, publish, write_durable

SHARD_BYTES = 5 * 10**9
"""Weights beyond this are spread over several safetensors files, as Hugging Face does."""

MODEL = "model."


def export_torch(source: Source, out: Path, on_bytes: OnBytes) -> None:
    """One file at `out` with model, optimizer and train state; see `lay_out_torch`."""
    with publish(out) as path:
        state = source.manifest.train_state
        facts = {"step": state.step, "cursor": state.cursor, "tokens": state.tokens}
        pour(path, lay_out_torch(path, source.contents.tensors, facts), source, on_bytes)


@dataclass(frozen=True)
class Form:
    """A model in another format: what each key is written as, and its name there. `files` are small
    files to add; `whole` is the name of the one file that has all tensors, if they fit into one, or
    are to be in one."""

    tensors: Mapping[str, Saved]
    names: Mapping[str, str]
    files: Mapping[str, bytes]
    whole: str = WHOLE


def export_safetensors(source: Source, out: Path, form: Form, on_bytes: OnBytes) -> None:
    """A folder at `out` with the model's weights. `model.safetensors`, or numbered files and
    `model.safetensors.index.json` where there is more than `SHARD_BYTES`."""
    largest = SHARD_BYTES if form.whole == WHOLE else total(form.tensors)
    shards, names, besides = shard(form.tensors, largest), form.names, form.files
    with publish(out) as path:
        path.mkdir()
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(shards, 1):
            of = len(shards)
            file = f"model-{number:05d}-of-{of:05d}.safetensors" if of > 1 else form.whole
            weight_map |= {names[key]: file for key in tensors}
            pour(path / file, lay_out_safetensors(path / file, tensors, names), source, on_bytes)
        if len(shards) > 1:
            size = sum(length(saved) for tensors in shards for saved in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            besides = {**besides, INDEX: _json(index)}
        for name, content in besides.items():
            write_durable(path / name, content)
        fsync_directory(path)


def export_dcp(source: Source, out: Path, on_bytes: OnBytes) -> None:
    """A folder at `out` for the stock `torch.distributed.checkpoint`: no manifest, no sums."""
    files = source.manifest.files
    with publish(out) as path:
        path.mkdir()
        for name, entry in files.items():
            if entry.sums is not None:
                copy_data_file(source.path, source.manifest, name, path / name, on_bytes)
        _write_metadata(source, path / METADATA)
        fsync_directory(path)


def _write_metadata(source: Source, target: Path) -> None:
    """DCP's `.metadata`, made now if the checkpoint has none, as that of a large world."""
    contents = source.contents
    if isinstance(contents, CompactIndex) and METADATA not in source.manifest.files:
        write_durable(target, metadata_of(contents.specs, contents.world))
    else:
        copy_small_file(source.path, source.manifest, METADATA, target)


def model_tensors(source: Source) -> dict[str, Saved]:
    tensors = source.tensors
    return {key: saved for key, saved in tensors.items() if key.startswith(MODEL)}


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
