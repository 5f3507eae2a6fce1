"""Loads a `Config` from a TOML file and overrides, and writes it as TOML."""

from __future__ import annotations

import errno
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError

from kempner.config.errors import ConfigError, describe_error, dotted, shorten
from kempner.config.overrides import Override, parse, place, translate
from kempner.config.section import expand_home
from kempner.config.sections import Config, RunSection

Keys = tuple[str | int, ...]
"""The path to a value: names of tables and keys, and indices in lists."""

_LARGEST_FILE = 1 << 20
"""Bytes; configurations have a few thousand."""

_NO_SUCH_PATH = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)

_SYNTAX_HINTS: Mapping[str, str] = {
    "Invalid value": "strings need quotes, true and false are lower case",
    "Cannot overwrite a value": "a key may be given only once",
}


def load(
    path: Path | None,
    overrides: Sequence[str] = (),
    explain: Callable[[str], object] = lambda sentence: None,
) -> Config:
    """Read the TOML file at `path` and apply `--section.key=value` arguments to it.

    `explain` gets a sentence for each key of other trainers that was translated (`[provisioner]`,
    `[actors]`). `run.name` defaults to the file's stem. A leading `~` in `path` is the user's home.
    Raises `ConfigError` if the file is missing or anything in it is wrong, `OSError` if storage
    fails.
    """
    path = None if path is None else _expand(path)
    table = {} if path is None else _parse_toml(path, read_file(path))
    try:
        table, sentences = translate(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for sentence in sentences:
        explain(sentence)
    known = known_keys()
    given = parse(overrides, known)
    for override in given:
        try:
            place(table, override.keys, override.value)
        except ConfigError as error:
            raise ConfigError(str(error) if path is None else f"{path}: {error}") from None
    for keys, value in _leaves(table):
        _refuse_unportable(keys, value, _origin(path, given, keys))
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, path, given, known)) from None
    return config if path is None or config.run.name is not None else _named_after(path, config)


def dumps(config: Config) -> str:
    """The configuration as TOML, without keys that are None, which TOML cannot express, and without
    sections of such keys alone."""
    return tomli_w.dumps(_without_empty(config.model_dump(exclude_none=True)))


def digest(config: Config) -> str:
    """SHA-256, in hexadecimal, of the sorted JSON of all keys that are not None, so that a later
    optional key, or a section of such keys, does not change it."""
    document = _without_empty(config.model_dump(mode="json", exclude_none=True))
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_empty(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if section}


def known_keys(schema: type[BaseModel] = Config) -> list[str]:
    """The dotted names of all keys, in the order of the schema: run.name, run.dir, ..."""
    names = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += [f"{name}.{below}" for below in known_keys(kind)]
        else:
            names.append(name)
    return names


def read_file(path: Path) -> bytes:
    """The bytes of a configuration file. Raises as `load` does."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a TOML file") from None
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_PATH:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ConfigError(f"{shorten(str(path))} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a null character in the path
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if len(content) > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than 1 MiB; name a configuration in TOML")
    return content


def _expand(path: Path) -> Path:
    try:
        return Path(expand_home(str(path)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _missing(path: Path) -> str:
    if str(path).startswith("-"):
        return f"{path} comes where the configuration file is expected; put the file first"
    return f"{path} does not exist; name a configuration in TOML"


def _parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml"):
        names = [shlex.quote(name) for name in (str(path), f"{path.stem}.toml")]
        command = f"kempner config convert {' > '.join(names)}"
        raise ConfigError(f"{path} is YAML, and kempner reads TOML; write `{command}`")
    try:
        return tomli.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}, {_syntax(error)}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all bounds
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{path}: not valid TOML: {reason}") from None


def _syntax(error: tomli.TOMLDecodeError) -> str:
    line = error.doc.split("\n")[error.lineno - 1].strip()
    hint = f" ({_SYNTAX_HINTS[error.msg]})" if error.msg in _SYNTAX_HINTS else ""
    place_in_file = f"line {error.lineno}, column {error.colno}"
    return f"{place_in_file}: not valid TOML: {error.msg}{hint}: {shorten(line)}"


def _named_after(path: Path, config: Config) -> Config:
    try:
        run = RunSection.model_validate({**config.run.model_dump(), "name": path.stem})
    except ValidationError:
        raise ConfigError(
            f"{path}: the run cannot be named after this file; set run.name, "
            "such as --run.name=my-run"
        ) from None
    return config.model_copy(update={"run": run})


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[Keys, object]]:
    """Yield every value that is not a table or list, with its keys. Not recursive: a file may nest
    deeper than Python's recursion limit."""
    waiting: list[tuple[Keys, object]] = [((), table)]
    while waiting:
        keys, node = waiting.pop()
        if isinstance(node, dict):
            waiting += [((*keys, key), below) for key, below in node.items()]
        elif isinstance(node, list):
            waiting += [((*keys, index), below) for index, below in enumerate(node)]
        else:
            yield keys, node


def _refuse_unportable(keys: Keys, value: object, origin: str) -> None:
    """Refuse values that Python accepts, but files, tensors or other readers of TOML do not. TOML's
    text is UTF-8 (undecodable bytes of an argument become lone surrogates), and its integers have
    64 bits (https://toml.io/en/v1.0.0#integer)."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{origin}: {dotted(keys)} must not hold a null character")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(
            f"{origin}: {dotted(keys)} must be valid UTF-8; for a path, go to its folder and give "
            "the rest of it"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{origin}: {dotted(keys)} must be a number of at most 64 bits")


def _explain(
    error: ValidationError, path: Path | None, given: Sequence[Override], known: Sequence[str]
) -> str:
    first, *others = error.errors(include_url=False)
    origin = _origin(path, given, first["loc"])
    hint = ""
    if first["type"] == "string_type" and origin.startswith("--"):
        name, _, text = origin.partition("=")
        hint = f"; put shell quotes around TOML's: {name}='\"{text}\"'"
    more = f" (and {len(others)} more)" if others else ""
    return f"{origin}: {describe_error(first, known)}{hint}{more}"


def _origin(path: Path | None, given: Sequence[Override], keys: Keys) -> str:
    """The origin of the value at `keys`; for a table, the file and all overrides inside it."""
    for override in given:
        if override.keys == keys[: len(override.keys)]:
            return override.argument
    inside = [override.argument for override in given if override.keys[: len(keys)] == keys]
    if path is None:
        return " ".join(inside)
    return " ".join([str(path), "with", *inside]) if inside else str(path)
