"""Hugging Face's files in `kempner checkpoint export` and `import`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.cli.checkpoint.trained_on import find_text
from kempner.config.model import ModelSection
from kempner.model.spec.adapter import Adapter, peft_config, peft_name
from kempner.model.spec.huggingface import (
    generation_config,
    is_unneeded,
    model_config,
    model_section,
    text_config,
    weight_name,
    weight_shapes,
)
from kempner.model.spec.shape import Shape
from kempner.run.process.exit_codes import DataError, UsageError, cannot_read

if TYPE_CHECKING:
    from kempner.checkpoint.convert.export import Form
    from kempner.checkpoint.convert.import_safetensors import TensorLocation, Weights
    from kempner.checkpoint.convert.tensor_copy import Source

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""As PEFT calls them."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    "generation_config.json",
)
"""Files of a Hugging Face folder that belong to its tokenizer."""

_OF_MODEL = (CONFIG, "generation_config.json")
"""What the folder of an adapter leaves to that of its model."""

_OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Keys of config.json that belong to the tokenizer."""


def is_hugging_face(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not _is_checkpoint(folder)


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST, METADATA))


def read_model(folder: Path, vocab_multiple: int) -> tuple[ModelSection, Weights]:
    """The configuration and the weights of a Hugging Face model. Raises `DataError` if kempner does
    not have this model, or its files do not fit together."""
    from kempner.checkpoint.convert.import_safetensors import Weights, find_tensors

    try:
        section = model_section(_read_config(folder))
    except DataError as error:
        raise DataError(f"{folder} cannot be imported: {error}") from error
    section = section.model_copy(update={"vocab_multiple": vocab_multiple})
    shape = Shape.of(section, section.vocab_size or 0)
    located = _pick(folder, shape, find_tensors(folder))
    tables = ("embed.weight", "output.weight")
    rows = {n: shape.vocab_rows if n in tables else t.shape[0] for n, t in located.items()}
    return section, Weights(located, rows, shape.fixed())


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors in Hugging Face's files, and is not a checkpoint."""
    from kempner.checkpoint.convert.tensor_copy import INDEX, WHOLE

    named = any((folder / name).is_file() for name in (WHOLE, INDEX))
    return named and not _is_checkpoint(folder)


def matching_names(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """Map names of Hugging Face to keys of the checkpoint, for tensors that `ours` has. A user's
    own model has the same names in both."""
    from kempner.checkpoint.convert.export import MODEL

    names: dict[str, str] = {}
    for key in ours:
        own = key.removeprefix(MODEL)
        name = next((name for name in (weight_name(own), own) if name in theirs), None)
        if name is not None:
            names[name] = key
    return names


def needless(folder: Path, theirs: Collection[str]) -> set[str]:
    """The tensors of a folder that follow from others, according to its `config.json`."""
    if not (folder / CONFIG).is_file():
        return set()
    try:
        section = model_section(_read_config(folder))
    except DataError:
        return set()
    shape = Shape.of(section, section.vocab_size or 0)
    return {name for name in theirs if is_unneeded(name, shape)}


def described(section: ModelSection) -> str:
    table = section.model_dump(exclude_defaults=True, exclude_none=True)
    return tomli_w.dumps({"model": table}).rstrip()


def taken_from(source: Source, merge: bool, base: str | None) -> Source:
    """What to export of a checkpoint. Raises `UsageError` for an option without effect on it."""
    from kempner.checkpoint.convert.tensor_copy import Merged

    record = source.manifest.identity.adapter
    if record is None and (merge or base is not None):
        option = "--merge" if merge else "--base"
        raise UsageError(f"{option} has no effect: {source.path.name} holds a whole model")
    if record is None or not merge:
        return source
    if base is not None:
        raise UsageError("--base has no effect with --merge, which makes a whole model")
    return Merged.of(source)


def exported_form(
    source: Source,
    directory: Path,
    dtype: str | None,
    data: Path | None,
    tokenizer: Path | None,
    base: str | None = None,
) -> tuple[Form, str]:
    """Dtypes, names and files of an export, and what is missing, in a clause. kempner's own model
    gets Hugging Face's names and files, another model keeps its names. Raises `DataError` if `data`
    or `tokenizer` is given and cannot be used."""
    from kempner.checkpoint.convert.export import MODEL, Form, model_tensors
    from kempner.checkpoint.convert.tensor_copy import Merged

    if source.base is not None and not isinstance(source, Merged):
        return _adapter_form(source, directory, dtype, data, tokenizer, base)
    saved = model_tensors(source)
    written = {
        key: replace(s, dtype=dtype) if dtype and "float" in s.dtype else s
        for key, s in saved.items()
    }
    record = source.manifest.identity.model
    own = {key: key.removeprefix(MODEL) for key in saved}
    theirs = {key: name for key, ours in own.items() if (name := weight_name(ours)) is not None}
    of_first = next((s.dtype for s in written.values()), "float32")
    config = model_config(record, of_first)
    if len(theirs) < len(own) or config is None:
        _refuse_text(source, data, tokenizer)
        return Form(written, own, {}), "config.json: it is not kempner's own model"
    rows = record["vocab_size"]
    for key in (f"{MODEL}embed.weight", f"{MODEL}output.weight"):
        if key in written:  # without padding rows
            written[key] = replace(written[key], shape=(rows, *written[key].shape[1:]))
    files, missing = _text_files(source, directory, config, data, tokenizer)
    return Form(written, theirs, files), missing


def _refuse_text(source: Source, data: Path | None, tokenizer: Path | None) -> None:
    for option, value in (("--data", data), ("--tokenizer", tokenizer)):
        if value is not None:
            raise UsageError(
                f"{option} has no effect: {source.path.name} is not of kempner's own model"
            )


def _adapter_form(
    source: Source,
    directory: Path,
    dtype: str | None,
    data: Path | None,
    tokenizer: Path | None,
    base: str | None,
) -> tuple[Form, str]:
    """What PEFT reads: the pairs, what they are, and the tokenizer; with what is missing."""
    from kempner.checkpoint.convert.export import MODEL, Form

    identity = source.manifest.identity
    written = {
        key: saved if dtype is None else replace(saved, dtype=dtype)
        for key, saved in source.contents.tensors.items()
        if key.startswith(MODEL)
    }
    names = {key: str(peft_name(key.removeprefix(MODEL))) for key in written}
    model = base or (None if tokenizer is None else str(tokenizer))
    config = peft_config(Adapter.recorded(identity.adapter or {}), model)
    described = model_config(identity.model, "float32")
    assert described is not None  # only kempner's own model has an adapter
    files, missing = _text_files(source, directory, described, data, tokenizer)
    kept = {name: content for name, content in files.items() if name not in _OF_MODEL}
    if model is None:
        missing = " and no ".join(filter(None, (missing, "name of its model: give it with --base")))
    return Form(written, names, {**kept, ADAPTER_CONFIG: _json(config)}, ADAPTER_WEIGHTS), missing


def _text_files(
    source: Source,
    directory: Path,
    config: dict[str, Any],
    data: Path | None,
    tokenizer: Path | None,
) -> tuple[dict[str, bytes], str]:
    """`config.json` and the tokenizer's files, and what is missing."""
    if tokenizer is not None:
        return _copied(tokenizer, config), ""
    try:
        text = find_text(directory, source.path, source.manifest, data)
    except DataError as error:
        if data is not None:
            raise
        return {CONFIG: _json({**config, **text_config(None, None)})}, f"tokenizer: {error}"
    eot, longest = text.tokenizer.eot, text.seq_len
    files = {
        CONFIG: _json({**config, **text_config(eot, longest)}),
        "generation_config.json": _json(generation_config(eot)),
        **text.tokenizer.hugging_face_files(longest),
    }
    return files, ""


def _copied(tokenizer: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """The tokenizer's files of another folder. Raises `DataError` if it has no tokenizer."""
    there = _read_config(tokenizer)
    if there.get("vocab_size") != config["vocab_size"]:
        raise DataError(
            f"{tokenizer} is of a model with {there.get('vocab_size')} token ids, this one has "
            f"{config['vocab_size']}"
        )
    of_text = {key: there[key] for key in _OF_TEXT if key in there}
    found = [name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not any(name.startswith("tokenizer") for name in found):
        raise DataError(f"{tokenizer} has no tokenizer.json, and no other tokenizer either")
    try:
        copied = {name: (tokenizer / name).read_bytes() for name in found}
    except OSError as error:
        raise cannot_read(str(error.filename), error) from error
    return {CONFIG: _json({**config, **of_text}), **copied}


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise cannot_read(path, error, "name a folder of Hugging Face") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is damaged: it is not a table")
    return config


def _pick(
    folder: Path, shape: Shape, found: Mapping[str, TensorLocation]
) -> dict[str, TensorLocation]:
    """The tensors of a model of this shape, by our names; refuses missing and unknown ones."""
    from kempner.checkpoint.convert.import_safetensors import EXACT

    picked: dict[str, TensorLocation] = {}
    for name, size in weight_shapes(shape).items():
        theirs = str(weight_name(name))
        tensor = found.get(theirs)
        if tensor is None:
            raise DataError(f"{folder} has no {theirs}, which its {CONFIG} asks for")
        if tensor.shape != size:
            raise DataError(
                f"{tensor.path}: {theirs} is {list(tensor.shape)}, and by {CONFIG} it must be "
                f"{list(size)}"
            )
        if tensor.dtype not in EXACT:
            raise DataError(f"{tensor.path}: {theirs} is {tensor.dtype}; import {', '.join(EXACT)}")
        picked[name] = tensor
    known = {str(weight_name(name)) for name in picked}
    if more := [name for name in found if name not in known and not is_unneeded(name, shape)]:
        raise DataError(f"{folder} has {more[0]}, which kempner's transformer does not have")
    return picked


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
