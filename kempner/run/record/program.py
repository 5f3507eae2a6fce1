"""The program of a run: its command, the variables that it reads, and its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

_RESUME = re.compile(r"--?(?:auto[-_])?resume(?P<from>[-_]from[\w-]*)?(?P<value>=.*)?")
"""Options that ask for what a run under kempner does anyway."""

_PLACE = re.compile(r"--local[-_]rank(?:=.*)?")
"""What old launchers add for each rank."""


def command_of_process(argv: Sequence[str], main: ModuleType, folder: str) -> tuple[str, ...]:
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


def command_of_words(words: Sequence[str], folder: str) -> tuple[str, ...]:
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


def relative(word: str, folder: str) -> str:
    """A word of a command line; a path below `folder` in it becomes relative to that."""
    name, equals, value = word.partition("=")
    if equals and Path(value).is_absolute():
        return f"{name}={_relative(value, folder)}"
    return _relative(word, folder)


def _relative(word: str, folder: str) -> str:
    if Path(word).is_absolute() and Path(word).is_relative_to(folder):
        return os.path.relpath(word, folder)
    return os.path.normpath(word) if word.endswith(".py") else word


def _arguments(words: Sequence[str], folder: str) -> Iterator[str]:
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
