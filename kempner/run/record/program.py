"""The program of a run: its command, the variables that it reads, its files, and copies of them.

A file belongs to the program if it is below the folder of the script (for `python -m`, the working
directory) and not part of an installation.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from kempner.run.output.logs import is_secret, logger
from kempner.run.record.identity import RunIdentity
from kempner.run.record.run_dir import RunDirectory

_MOST = 500
"""Most files that are examined."""

_LARGEST = 4 << 20
"""Largest file that is read, in bytes."""

_SYSTEM = re.compile(
    r"((LOCAL|GLOBAL|GROUP|NODE|ROLE|PROC)_)?(RANK|WORLD_SIZE)$|MASTER_|SLURM|SBATCH|PBS_|LSB_|"
    r"KEMPNER|CUDA_|NVIDIA_|NCCL_|GLOO_|OMP_|MKL_|OPENBLAS_|TORCH|PYTHON|XDG_|LC_|WANDB|MLFLOW|"
    r"COMET|HF_|TRANSFORMERS_|TOKENIZERS_|(HOME|PATH|USER|LOGNAME|SHELL|PWD|TERM|DISPLAY|LANG)$|"
    r"(OUT|LOG|PORT|START)(ING|ED|PUT|PUTS|S|DIR|FILE|PATH|LEVEL)?(_|$)"
)
"""Beginnings of the names of variables that describe the machine, the job or output paths."""

_OF_THE_PLACE = re.compile(
    r"(?:^|_)(OUTPUTS?|RESULTS?|SAVE|CHECKPOINTS?|CKPTS?|CACHE|TMP|TMPDIR|TEMPDIR|SCRATCH|HOST|"
    r"HOSTNAME|ADDR|ADDRESS|URL|URI|PORT|LOGS?|DEBUG|VERBOSE|WORKERS|DEVICE|JOB|NODES?)(?:_|$)"
)
"""Words in the names of such variables."""


def own_sources(script: Path, root: Path) -> dict[str, Path]:
    """The script and the files that it imports, directly or not, by path relative to `root`."""
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
    """The files of the loaded modules, which include those that no import names literally."""
    found: dict[str, Path] = {}
    below = f"{str(root).rstrip(os.sep)}{os.sep}"
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == "kempner":
            continue
        # Thousands of modules are loaded: making a `Path` of each would dominate the time.
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
    found: dict[str, str] = {}
    for name, path in sorted(files.items()):
        if (content := read_small(path)) is not None:
            found[name] = blake2b(content, digest_size=16).hexdigest()
    return found


def read_small(path: Path) -> bytes | None:
    with suppress(OSError):
        if path.stat().st_size <= _LARGEST:
            return path.read_bytes()
    return None


def variables_read(sources: Iterable[Path]) -> set[str]:
    """The environment variables that these files read by a literal name and do not set, without
    those that describe the machine, the job or output paths."""
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
    """The values of variables; for an absolute path only its last part, since folders of jobs
    change."""
    values = {name: environ.get(name) for name in sorted(names)}
    return {n: Path(v).name if v and Path(v).is_absolute() else v for n, v in values.items()}


def _is_own(path: Path, root: Path) -> bool:
    """Whether a file belongs to the program: not part of an installation, and not hidden."""
    if not path.is_relative_to(root):
        return False
    parts = path.relative_to(root).parts
    hidden = any(part.startswith(".") or part.endswith("-packages") for part in parts)
    return not hidden and path.is_file()


@dataclass(frozen=True)
class _Source:
    """Facts of a Python file: each import as level and dotted name, and each environment variable
    with whether it is set."""

    imports: tuple[tuple[int, str], ...] = ()
    variables: tuple[tuple[str, bool], ...] = ()


@cache
def _scan(path: Path) -> _Source:
    """The facts of a file at the first call; empty if it is not Python."""
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
    """The files that an import of a dotted name may load: the packages' and the module's."""
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


_RESUME = re.compile(r"--?(?:auto[-_])?resume(?P<from>[-_]from[\w-]*)?(?P<value>=.*)?")
"""Options to resume, which a run under kempner does anyway."""

_PLACE = re.compile(r"--local[-_]rank(?:=.*)?")
"""The option that old launchers add for each rank."""


def command_of_process(argv: Sequence[str], main: ModuleType, folder: Path) -> tuple[str, ...]:
    """The program of this process with its arguments (`sys.argv`). A module is "-m" and its name;
    paths below `folder`, the working directory, become relative."""
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return ("-m", name, *_arguments(argv[1:], folder))
    if not argv or argv[0] in ("", "-c", "-"):
        return ()
    return (relative(argv[0], folder), *_arguments(argv[1:], folder))


def command_of_words(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """As `command_of_process`, for a command line: without wrappers and interpreter options before
    the program, or all of it if it contains no Python program."""
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
    """The identity of this process's program, before its loop adds its arguments."""
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
    script, root = _main_file(modules["__main__"], folder)
    if script is None:
        return {}
    loaded = loaded_sources(modules, root)
    return own_sources(script, root) | loaded | named_files(argv[1:], folder)


def _main_file(main: ModuleType, folder: Path) -> tuple[Path | None, Path]:
    """The file of the main module, and the folder of the program's files."""
    file = getattr(main, "__file__", None)
    if file is None:
        return None, folder
    script = Path(file).absolute()
    named = getattr(main, "__spec__", None) is not None
    return script, folder if named else script.parent


def identity_of_words(
    words: Sequence[str], environ: Mapping[str, str], folder: Path
) -> RunIdentity:
    """The identity of a command line's program, as far as it is known without running it."""
    command = command_of_words(words, folder)
    script, root = _find_script(command, folder)
    sources = own_sources(script, root) if script is not None else {}
    values = values_of(variables_read(sources.values()), environ)
    return RunIdentity(launched=command, environment=values)


def script_of_words(words: Sequence[str], folder: Path) -> Path | None:
    """The script of a command line, which need not exist; None if it names none, or may be a
    module."""
    script, _ = _find_script(command_of_words(words, folder), folder)
    return script


_SETTINGS = (".py", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg", ".sh")
"""Suffixes of files that a program may read without naming them on its command line."""

_MOST_ENTRIES = 2000
"""Most entries of folders that are searched for them."""


def files_of_words(words: Sequence[str], folder: Path) -> dict[str, Path]:
    """The files on which a command line may depend, by path, and possibly more; none if its script
    is not found, or its folder is too large to search."""
    script, root = _find_script(command_of_words(words, folder), folder)
    beside = None if script is None else _settings_below(root)
    if script is None or beside is None or not script.is_file():
        return {}
    return own_sources(script, root) | named_files(words, folder) | beside


def _settings_below(root: Path) -> dict[str, Path] | None:
    """The sources and settings below a folder, without those of runs; None if it is too large to
    search."""
    found: dict[str, Path] = {}
    seen = 0
    for at, folders, files in os.walk(root):
        seen += len(folders) + len(files)
        if seen > _MOST_ENTRIES:
            return None
        if "ledger.jsonl" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        wanted = (Path(at, name) for name in files if name.endswith(_SETTINGS))
        found |= {os.path.relpath(path, root): path for path in wanted if _is_own(path, root)}
    return found


def _find_script(command: Sequence[str], folder: Path) -> tuple[Path | None, Path]:
    """The file of a command's program, and the folder of the program's files."""
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
    """A word of a command line, with a path below `folder` made relative to it."""
    name, equals, value = word.partition("=")
    if equals and Path(value).is_absolute():
        return f"{name}={_relative(value, folder)}"
    return _relative(word, folder)


def _relative(word: str, folder: Path) -> str:
    if Path(word).is_absolute() and Path(word).is_relative_to(folder):
        return os.path.relpath(word, folder)
    return os.path.normpath(word) if word.endswith(".py") else word


def _arguments(words: Sequence[str], folder: Path) -> Iterator[str]:
    """The arguments, without those that do not affect the result."""
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


_WITHIN = 10.0
"""Seconds that git gets to list its files."""


def keep_copies(run: RunDirectory, files: Mapping[str, Path]) -> None:
    """Copy each file that git tracks to `program/` of the run, readable by its owner only, once for
    each content. Hidden and large files are skipped; a failure is logged."""
    wanted: dict[Path, Path] = {}
    contents: dict[Path, bytes] = {}
    for name, path in files.items():
        content = None if _is_hidden(name) else read_small(path)
        if content is not None:
            copy = run.program / f"{blake2b(content, digest_size=6).hexdigest()}-{path.name}"
            if not copy.exists():
                wanted[path], contents[path] = copy, content
    try:
        for path in _tracked(list(wanted)):
            _write(wanted[path], contents[path])
    except OSError as error:
        logger().warning("cannot keep a copy of the program", error=str(error))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in Path(name).parts)


def _tracked(paths: Sequence[Path]) -> list[Path]:
    """The files that git tracks; none without git."""
    by_name = {str(path): path for path in paths}
    if not by_name:
        return []
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    command = ["git", "-C", str(folder), "ls-files", "-z", "--", *by_name]
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(command, capture_output=True, timeout=_WITHIN, check=False).stdout
        names = [str(folder / os.fsdecode(name)) for name in listed.split(b"\0") if name]
        return [by_name[name] for name in names if name in by_name]
    return []


def _write(copy: Path, content: bytes) -> None:
    """Write atomically, since another start may write the same copy."""
    copy.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    temporary.rename(copy)
