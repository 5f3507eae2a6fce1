"""The program of a run: its command, the variables that it reads, and its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from kempner.run.record.identity import RunIdentity
from kempner.run.record.program.files import (
    digests,
    loaded_sources,
    named_files,
    own_sources,
    values_of,
    variables_read,
)

_RESUME = re.compile(r"--?(?:auto[-_])?resume(?P<from>[-_]from[\w-]*)?(?P<value>=.*)?")
"""Options that ask for what a run under kempner does anyway."""

_PLACE = re.compile(r"--local[-_]rank(?:=.*)?")
"""What old launchers add for each rank."""


def command_of_process(argv: Sequence[str], main: ModuleType, folder: Path) -> tuple[str, ...]:
    """The program that this process runs, with its arguments: `argv` is `sys.argv`.

    A module that was started by its name is "-m" and the name; paths below `folder`, the working
    directory, are relative to it.
    """
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return ("-m", name, *_arguments(argv[1:], folder))
    if not argv or argv[0] in ("", "-c", "-"):
        return ()
    return (relative(argv[0], folder), *_arguments(argv[1:], folder))


def command_of_words(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The same for a command line; options of the interpreter and wrappers before the program are
    left out. All of it where no program of Python is seen in it.
    """
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return (relative(word, folder), *_arguments(words[place + 1 :], folder))
        if word == "-m" and place and Path(words[place - 1]).name.startswith("python"):
            following = words[place + 1 :]
            return ("-m", *following[:1], *_arguments(following[1:], folder))
    return tuple(relative(word, folder) for word in words)


def identity_of_process(
    argv: Sequence[str],
    modules: Mapping[str, ModuleType],
    environ: Mapping[str, str],
    folder: Path,
) -> RunIdentity:
    """What the program of this process is, before its loop says more."""
    main = modules["__main__"]
    command = command_of_process(argv, main, folder)
    files = files_of_process(argv, modules, folder)
    script, root = _main_file(main, folder)
    sources = own_sources(script, root) if script is not None else {}
    values = values_of(variables_read(sources.values()), environ)
    return RunIdentity(command, environment=values, files=digests(files))


def files_of_process(
    argv: Sequence[str], modules: Mapping[str, ModuleType], folder: Path
) -> dict[str, Path]:
    """The files of this process's program, by the names that its identity gives them."""
    script, root = _main_file(modules["__main__"], folder)
    if script is None:
        return {}
    loaded = loaded_sources(modules, root)
    return own_sources(script, root) | loaded | named_files(argv[1:], folder)


def _main_file(main: ModuleType, folder: Path) -> tuple[Path | None, Path]:
    """The file of the main module, and the folder that the program's own files are below."""
    file = getattr(main, "__file__", None)
    if file is None:
        return None, folder
    script = Path(file).absolute()
    named = getattr(main, "__spec__", None) is not None
    return script, folder if named else script.parent


def identity_of_words(
    words: Sequence[str], environ: Mapping[str, str], folder: Path
) -> RunIdentity:
    """What the program of a command line is, as far as that can be seen from outside of it."""
    command = command_of_words(words, folder)
    script, root = _find_script(command, folder)
    sources = own_sources(script, root) if script is not None else {}
    values = values_of(variables_read(sources.values()), environ)
    return RunIdentity(launched=command, environment=values)


def _find_script(command: Sequence[str], folder: Path) -> tuple[Path | None, Path]:
    """The file of a command's program, and the folder that its own files are below."""
    first = command[0] if command else ""
    if first.endswith(".py"):
        script = (folder / first).absolute()
        return script, script.parent
    if first == "-m" and len(command) > 1:
        module = folder.joinpath(*command[1].split("."))
        for script in (module.with_name(f"{module.name}.py"), module / "__main__.py"):
            if script.is_file():
                return script, folder
    return None, folder


def relative(word: str, folder: Path) -> str:
    """A word of a command line; a path below `folder` in it becomes relative to that."""
    name, equals, value = word.partition("=")
    if equals and Path(value).is_absolute():
        return f"{name}={_relative(value, folder)}"
    return _relative(word, folder)


def _relative(word: str, folder: Path) -> str:
    if Path(word).is_absolute() and Path(word).is_relative_to(folder):
        return os.path.relpath(word, folder)
    return os.path.normpath(word) if word.endswith(".py") else word


def _arguments(words: Sequence[str], folder: Path) -> Iterator[str]:
    """Without those that say nothing of the result."""
    follows = False
    for word in words:
        value_of_option = follows and not word.startswith("-")
        follows = False
        if value_of_option or _PLACE.fullmatch(word):
            continue
        if asks := _RESUME.fullmatch(word):
            follows = bool(asks["from"]) and not asks["value"]
            continue
        yield relative(word, folder)
