"""How a job gets the environment that kempner is installed in: the shell lines that do it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

_CONTAINERS = {"APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity"}
_BASE = re.compile(r"^home\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MADE_BY_UV = re.compile(r"^uv\s*=", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """What is known of the running Python and its shell.

    Attributes:
        python: path of the interpreter; empty if it has none.
        prefix: its `sys.prefix`.
        variables: of the shell.
        venv: text of `pyvenv.cfg` in the prefix; empty if there is none.
        conda: whether the prefix is an environment of conda or mamba.
    """

    python: str
    prefix: str
    variables: Mapping[str, str]
    venv: str = ""
    conda: bool = False


@dataclass(frozen=True)
class Environment:
    """How a job gets it.

    Attributes:
        python: the Python that has kempner; empty if batch scripts cannot start it.
        kinds: what it is, such as `modules gcc/13` and `conda /envs/it`.
        lines: of bash, to be run before that Python is.
        container: the command before the ranks' command, where kempner was in a container.
    """

    python: str
    kinds: Sequence[str] = ()
    lines: Sequence[str] = ()
    container: Sequence[str] = ()

    def script(self) -> str:
        """The lines, with the Python at the end."""
        value = shlex.quote(self.python)
        return "".join(
            f"{line}\n" for line in (*self.lines, f"KEMPNER_PYTHON=${{KEMPNER_PYTHON:-{value}}}")
        )


def recognise(facts: Facts) -> Environment:
    """Modules, a conda, mamba, uv or plain virtual environment, or a container."""
    for variable, program in _CONTAINERS.items():
        if image := facts.variables.get(variable):
            return Environment(
                facts.python, [f"container {image}"], (), (program, "exec", "--nv", image)
            )
    modules = [name for name in facts.variables.get("LOADEDMODULES", "").split(":") if name]
    kinds = [f"modules {' '.join(modules)}"] if modules else []
    lines = _module_lines(modules, facts.variables.get("MODULESHOME", ""))
    if facts.venv:
        kinds.append(f"{'uv' if _MADE_BY_UV.search(facts.venv) else 'venv'} {facts.prefix}")
        if base := _BASE.search(facts.venv):
            lines.append(
                f"# Every node must see {facts.prefix}, and {base[1]}, which it is made of."
            )
    elif facts.conda:
        kinds.append(f"conda {facts.prefix}")
        lines += _conda_lines(facts)
    return Environment(facts.python, kinds, lines)


def _module_lines(modules: Sequence[str], home: str) -> list[str]:
    """A batch script is no login shell, so that it may not know `module`."""
    if not modules:
        return []
    known = (
        [f"type module &>/dev/null || source {shlex.quote(f'{home}/init/bash')}"] if home else []
    )
    return [*known, f"module load {shlex.join(modules)}"]


def _conda_lines(facts: Facts) -> list[str]:
    """By conda where it is known, else by micromamba or mamba alone."""
    prefix, parent = shlex.quote(facts.prefix), PurePath(facts.prefix).parent
    conda, mamba = (facts.variables.get(name, "") for name in ("CONDA_EXE", "MAMBA_EXE"))
    if mamba and not conda:
        name = PurePath(mamba).name
        return [
            f'eval "$({shlex.quote(mamba)} shell hook --shell bash)"',
            f"{name} activate {prefix}",
        ]
    root = PurePath(conda).parents[1] if conda else parent.parent
    if not conda and parent.name != "envs":
        return []
    script = shlex.quote(str(root / "etc/profile.d/conda.sh"))
    return [f"source {script}", f"conda activate {prefix}"]
