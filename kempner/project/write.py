"""Fills in and writes the files of a new project.

The templates are the scripts and configurations of kempner's own repository, so that they are
tested as they are. This module sets the lines that depend on the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from errno import ENOTDIR
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import tomli_w

from kempner.project.site import Environment, Request, Site, choose
from kempner.run.process.exit_codes import UsageError, cannot_write

_EXECUTABLE = ".sh"


def read_templates(sft: bool = False) -> dict[str, str]:
    """The files of a project as they come; with `sft` of one for fine-tuning from chats."""
    found = dict(_walk(files("kempner.project") / "template", ""))
    if not sft:
        return found
    for name in _NOT_FOR_CHATS:
        del found[name]
    return found | dict(_walk(files("kempner.project") / "sft", ""))


_NOT_FOR_CHATS = ("7b.toml", "surviving.py")


def _walk(folder: Traversable, at: str) -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name != "__pycache__":
                found += _walk(entry, f"{at}{entry.name}/")
        else:
            found.append((f"{at}{entry.name}", entry.read_text("utf-8")))
    return found


def write_project(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the files into a folder that is new, or has only hidden files. Returns the names of
    files that existed before, which stay unchanged. If one cannot be written, all are removed
    again. Raises `UsageError`, and as `cannot_write`."""
    written: list[Path] = []
    kept: list[str] = []
    made: list[Path] = []
    try:
        _refuse_if_used(folder)
        _make_folder(folder, made)
        for name, text in texts.items():
            path = folder / name
            _make_folder(path.parent, made)
            try:
                with open(path, "x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
            except FileExistsError:
                kept.append(name)
                continue
            if path.suffix == _EXECUTABLE:
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        _remove(written, made)
        raise cannot_write(error.filename or folder, error) from error
    return kept


def _refuse_if_used(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name a new or an empty one")
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if there:
        raise UsageError(f"{folder} is not empty: {there[0]} is there; name a new or an empty one")


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Make a folder and its parents; new ones are added to `made`."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder))
    _make_folder(folder.parent, made)
    folder.mkdir()
    made.append(folder)


def _remove(written: list[Path], made: list[Path]) -> None:
    for path in reversed(written):
        path.unlink(missing_ok=True)
    for folder in reversed(made):
        folder.rmdir()


CONFIG = "train.toml"
"""The configuration of a new project."""

_TEMPLATE_CONFIG = "configs/train/7b.toml"
_EDIT = re.compile(r"^# Edit the lines below for your cluster.*\n", re.MULTILINE)
_ENVIRONMENT = re.compile(r"^# begin\n.*?^# end\n", re.MULTILINE | re.DOTALL)
_NODES = re.compile(r"^#SBATCH --nodes=(\d+)$", re.MULTILINE)


def project_files(site: Site, templates: Mapping[str, str]) -> dict[str, str]:
    """The text of each file of a project by its path, from `templates`. Batch scripts stay general
    if nothing is known of the site's partitions."""
    request = choose(site)
    files = {}
    for name, text in templates.items():
        if name.endswith("environment.sh"):
            text = with_environment(text, site.environment)
        elif name.endswith(".sh"):
            text = text.replace(_TEMPLATE_CONFIG, CONFIG)
            text = text if request is None else with_request(text, request)
        elif name == CONFIG:
            if site.fabric:  # replaces the commented example
                text = text.replace('# interface = "ib0"', f'# interface = "{site.fabric}"')
            text += container_section(site.environment)
        files[".gitignore" if name == "gitignore" else name] = text
    return files


def with_environment(script: str, environment: Environment) -> str:
    """environment.sh with the lines that set up kempner's Python. In a container it stays
    unchanged: a job cannot use that Python, and the script looks for another."""
    if environment.container:
        return script
    written = f"# begin\n{environment.script()}# end\n"
    return _ENVIRONMENT.sub(lambda _: written, script, count=1)


def container_section(environment: Environment) -> str:
    if not environment.container:
        return ""
    prefix = list(environment.container)
    slurm = {"python": environment.python, "container": {"prefix": prefix}}
    return f"\n# `kempner init` ran in this container.\n{tomli_w.dumps({'slurm': slurm})}"


def with_request(script: str, request: Request) -> str:
    """A batch script with this request; other scripts stay unchanged."""
    if "#SBATCH" not in script:
        return script
    one_task = "--ntasks-per-node=1\n" in script  # a task that has all CPUs and GPUs of its node
    cpus = request.kind.cpus if one_task else request.cpus_per_rank
    script = _EDIT.sub(lambda _: _found(request), script)
    script = _set(script, "ntasks-per-node", "1" if one_task else str(request.ranks_per_node))
    script = _set(script, "gpus-per-node", str(request.kind.gpus) if request.kind.gpus else None)
    script = _set(script, "cpus-per-task", str(cpus))
    script = _set(script, "time", request.time)
    script = _NODES.sub(lambda f: f"#SBATCH --nodes={min(int(f[1]), request.kind.count)}", script)
    added = f"#SBATCH --partition={request.kind.partition}\n"
    if request.account:
        added += f"#SBATCH --account={request.account}\n"
    return re.sub(r"^(#SBATCH --job-name=.*\n)", lambda f: f[1] + added, script, flags=re.MULTILINE)


def _found(request: Request) -> str:
    lines = [
        "The lines below ask for what sinfo and sacctmgr showed; other options override them:",
        "sbatch -p PARTITION -A ACCOUNT ...",
        f"Chosen: {request.kind.described()}",
        *(f"Others: {kind.described()}" for kind in request.others),
    ]
    if request.other_accounts:
        lines.append(f"Other accounts: {', '.join(request.other_accounts)}")
    return "".join(f"# {line}\n" for line in lines)


def _set(script: str, option: str, value: str | None) -> str:
    """Change the value of an option in the script, or (None) remove it."""
    line = "" if value is None else f"#SBATCH --{option}={value}\n"
    return re.sub(rf"^#SBATCH --{option}=.*\n", lambda _: line, script, flags=re.MULTILINE)
