"""The files of the user's program: which they are, what they hold, and what they read.

A file belongs to it if it is below the folder of the script (of the working directory for a module
that was started by its name) and no part of an installation.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from kempner.run.output.redact import is_secret

_MOST = 500
"""Files that are looked at."""

_LARGEST = 4 << 20
"""Bytes of a file that is read."""

_SYSTEM = re.compile(
    r"((LOCAL|GLOBAL|GROUP|NODE|ROLE|PROC)_)?(RANK|WORLD_SIZE)$|MASTER_|SLURM|SBATCH|PBS_|LSB_|"
    r"KEMPNER|CUDA_|NVIDIA_|NCCL_|GLOO_|OMP_|MKL_|OPENBLAS_|TORCH|PYTHON|XDG_|LC_|WANDB|MLFLOW|"
    r"COMET|HF_|TRANSFORMERS_|TOKENIZERS_|(HOME|PATH|USER|LOGNAME|SHELL|PWD|TERM|DISPLAY|LANG)$|"
    r"(OUT|LOG|PORT|START)(ING|ED|PUT|PUTS|S|DIR|FILE|PATH|LEVEL)?(_|$)"
)
"""How the names of variables begin that tell of the machine, of the job or of where things go."""

_OF_THE_PLACE = re.compile(
    r"(?:^|_)(OUTPUTS?|RESULTS?|SAVE|CHECKPOINTS?|CKPTS?|CACHE|TMP|TMPDIR|TEMPDIR|SCRATCH|HOST|"
    r"HOSTNAME|ADDR|ADDRESS|URL|URI|PORT|LOGS?|DEBUG|VERBOSE|WORKERS|DEVICE|JOB|NODES?)(?:_|$)"
)
"""Words in the names of such variables."""


def own_sources(script: Path, root: Path) -> dict[str, Path]:
    """The script and what it leads to by its imports, by path relative to `root`."""
    found: dict[str, Path] = {}
    waiting = [script.absolute()]
    while waiting and len(found) < _MOST:
        path = waiting.pop()
        name = os.path.relpath(path, root)
        if name in found or not (path.is_file() if path == script else _is_own(path, root)):
            continue
        found[name] = path
        waiting += _imported_by(path, root)
    return found


def loaded_sources(modules: Mapping[str, ModuleType], root: Path) -> dict[str, Path]:
    """The files of the modules that are loaded, such as those that no import names literally."""
    found: dict[str, Path] = {}
    below = f"{str(root).rstrip(os.sep)}{os.sep}"
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == "kempner":
            continue
        # Thousands of modules are loaded: a `Path` of each would take longer than all the rest.
        if os.path.isabs(file) and not file.startswith(below):  # noqa: PTH117
            continue
        path = Path(file).absolute()
        if _is_own(path, root) and len(found) < _MOST:
            found[os.path.relpath(path, root)] = path
    return found


def named_files(words: Sequence[str], folder: Path) -> dict[str, Path]:
    """The files that a command line names, such as a configuration, relative to `folder`."""
    found: dict[str, Path] = {}
    for word in words:
        value = word.partition("=")[2] or word
        with suppress(OSError, ValueError):
            path = (folder / value).absolute()
            if not path.name.startswith(".") and path.is_file():
                found[os.path.relpath(path, folder)] = path
    return found


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """A digest of what each file holds; those that are large, or cannot be read, are left out."""
    found: dict[str, str] = {}
    for name, path in sorted(files.items()):
        if (content := read_small(path)) is not None:
            found[name] = blake2b(content, digest_size=16).hexdigest()
    return found


def read_small(path: Path) -> bytes | None:
    """What a file holds; None if it is large, or cannot be read."""
    with suppress(OSError):
        if path.stat().st_size <= _LARGEST:
            return path.read_bytes()
    return None


def variables_read(sources: Iterable[Path]) -> set[str]:
    """The environment variables that these files read by a literal name, and do not set themselves,
    but for those that tell of the machine, of the job or of where things go.
    """
    read: set[str] = set()
    written: set[str] = set()
    for path in sources:
        for name, sets in _scan(path).variables:
            (written if sets else read).add(name)
    return {name for name in read - written if counts(name)}


def counts(name: str) -> bool:
    """Whether the result may depend on a variable of this name."""
    upper = name.upper()
    return not (_SYSTEM.match(upper) or _OF_THE_PLACE.search(upper) or is_secret(name))


def values_of(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    """The values of variables; of an absolute path its last part, since folders of jobs change."""
    return {name: _without_folders(environ.get(name)) for name in sorted(names)}


def _without_folders(value: str | None) -> str | None:
    return Path(value).name if value and Path(value).is_absolute() else value


def _is_own(path: Path, root: Path) -> bool:
    """Whether a file is one of the program's: no part of an installation, and not hidden."""
    if not path.is_relative_to(root):
        return False
    parts = path.relative_to(root).parts
    hidden = any(part.startswith(".") or part.endswith("-packages") for part in parts)
    return not hidden and path.is_file()


@dataclass(frozen=True)
class _Source:
    """What a file of Python says: each import as its level and dotted name, and each variable of
    the environment with whether it is set."""

    imports: tuple[tuple[int, str], ...] = ()
    variables: tuple[tuple[str, bool], ...] = ()


@cache
def _scan(path: Path) -> _Source:
    """As it is when first asked for; nothing of what is no Python."""
    content = read_small(path) if path.suffix == ".py" else None
    try:
        nodes = list(ast.walk(ast.parse(content or b"")))
    except (SyntaxError, ValueError, RecursionError):
        return _Source()
    imports = tuple(found for node in nodes for found in _imports(node))
    return _Source(imports, tuple(found for node in nodes for found in _variables(node)))


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield 0, alias.name
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield node.level, ".".join([*([node.module] if node.module else []), alias.name])


def _imported_by(path: Path, root: Path) -> Iterator[Path]:
    for level, name in _scan(path).imports:
        base = path.parent.joinpath(*[".."] * (level - 1)).resolve() if level else root
        yield from _files_of(base, name)


def _files_of(base: Path, name: str) -> Iterator[Path]:
    """Those that an import of a dotted name may load: of each package, and of the module."""
    path = base
    for part in name.split("."):
        path /= part
        for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if candidate.is_file():
                yield candidate


def _variables(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each literal name of a variable, and whether it is set here."""
    if isinstance(node, ast.Subscript) and _is_environ(node.value):
        yield from _named(node.slice, sets=not isinstance(node.ctx, ast.Load))
    elif isinstance(node, ast.Call) and node.args:
        called = _last_name(node.func)
        if called == "getenv":
            yield from _named(node.args[0], sets=False)
        elif isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
            yield from _named(node.args[0], sets=called == "setdefault")
    elif isinstance(node, ast.Compare) and any(map(_is_environ, node.comparators)):
        yield from _named(node.left, sets=False)


def _named(node: ast.expr, *, sets: bool) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, sets


def _is_environ(node: ast.expr) -> bool:
    return _last_name(node) == "environ"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
