"""How a batch script of `kempner init`, and one of a checkout, gets to the Python with kempner."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import tomli
from harness import ROOT
from patience import scaled

from kempner.config.loading import load
from kempner.project.site import Environment, Facts, Site, recognise
from kempner.project.write import project_files, read_templates, write_project

UV = "home = /home/me/.local/share/uv/python/cpython-3.12/bin\nuv = 0.9.2\n"
MODULES = {"LOADEDMODULES": "gcc/13:python/3.12", "MODULESHOME": "/opt/lmod"}
LOADED = ("type module &>/dev/null || source /opt/lmod/init/bash", "module load gcc/13 python/3.12")


@pytest.mark.parametrize(
    ("facts", "kinds", "lines"),
    [
        (Facts("/usr/bin/python3", "/usr", {}), [], []),
        (Facts("/e/bin/python", "/e", {}, "home = /usr/bin\n"), ["venv /e"], ["# ... /usr/bin, "]),
        (Facts("/e/bin/python", "/e", MODULES, UV), ["modules gcc/13 python/3.12", "uv /e"],
         [*LOADED, "# ... /home/me/.local/share/uv/python/cpython-3.12/bin, "]),
        (Facts("/c/envs/it/bin/python", "/c/envs/it", {"CONDA_EXE": "/c/bin/conda"}, conda=True),
         ["conda /c/envs/it"], ["source /c/etc/profile.d/conda.sh", "conda activate /c/envs/it"]),
        (Facts("/c/envs/it/bin/python", "/c/envs/it", {}, conda=True),  # called by its path
         ["conda /c/envs/it"], ["source /c/etc/profile.d/conda.sh", "conda activate /c/envs/it"]),
        (Facts("/my envs/it/bin/python", "/my envs/it", {"MAMBA_EXE": "/b/micromamba"}, conda=True),
         ["conda /my envs/it"],
         ['eval "$(/b/micromamba shell hook --shell bash)"', "micromamba activate '/my envs/it'"]),
        (Facts("/elsewhere/it/bin/python", "/elsewhere/it", {}, conda=True),
         ["conda /elsewhere/it"], []),
        # A virtual environment on top of conda's base, which is active in each of its shells.
        (Facts("/e/bin/python", "/e", {"CONDA_EXE": "/c/bin/conda"}, "home = /c/bin\n"),
         ["venv /e"], ["# ... /c/bin, "]),
    ],
)  # fmt: skip
def test_what_is_active_is_recognised(facts: Facts, kinds: list[str], lines: list[str]) -> None:
    found = recognise(facts)
    assert (found.python, list(found.kinds), found.container) == (facts.python, kinds, ())
    assert len(found.lines) == len(lines)
    for line, expected in zip(found.lines, lines, strict=True):
        begins, _, inside = expected.partition("...")
        assert line.startswith(begins)
        assert inside.strip() in line


FAKE_PYTHON = """#!/bin/bash
[[ $* == *--version ]] && exit
echo "$0 $*; first ${PATH%%:*}; modules ${LOADED:-}; conda ${ACTIVE:-}"
"""
"""A Python with kempner, which tells how it was called."""


def fake_python(folder: Path) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return python


def run_script(
    project: Path, environ: Mapping[str, str] = {}, name: str = "multinode.sh"
) -> subprocess.CompletedProcess[str]:
    """As slurmd starts it where nothing is exported: `sbatch --export=NONE`."""
    (project / "train.toml").touch()
    given = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(project), **environ}
    return subprocess.run(
        ["bash", f"scripts/slurm/{name}", "train.toml"],
        cwd=project,
        env=given,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


@pytest.mark.parametrize("name", ["multinode.sh", "singlenode.sh", "torchrun.sh", "join.sh"])
def test_a_job_loads_modules_and_activates_conda_as_they_were(tmp_path: Path, name: str) -> None:
    """Though their scripts use variables that are not set, and the job exports nothing."""
    python = fake_python(tmp_path / "it's conda" / "envs" / "it")
    root = tmp_path / "it's conda"
    (root / "etc/profile.d").mkdir(parents=True)
    (root / "etc/profile.d/conda.sh").write_text('conda() { export ACTIVE="$2$UNSET"; }\n')
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { shift; export LOADED="$*$UNSET"; }\n')
    variables = {"LOADEDMODULES": "gcc/13:cuda/12.6", "MODULESHOME": str(tmp_path)}
    found = recognise(Facts(str(python), str(root / "envs/it"), variables, conda=True))
    project = tmp_path / "project"
    write_project(project, project_files(Site(found), read_templates()))

    done = run_script(project, name=name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{python} -P -m kempner ")
    told = f"; first {python.parent}; modules gcc/13 cuda/12.6; conda {root}/envs/it\n"
    assert done.stdout.endswith(told)


@pytest.mark.parametrize("where", ["VIRTUAL_ENV", "CONDA_PREFIX", ".venv", "PATH", "none"])
def test_a_checkouts_script_takes_the_environment_that_is_there(tmp_path: Path, where: str) -> None:
    """After `pip install .` into any environment, and with none of the checkout's own."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/slurm").symlink_to(ROOT / "scripts/slurm")
    python = fake_python(tmp_path / (".venv" if where == ".venv" else "envs/it"))
    environ = {where: str(python.parents[1])} if where.isupper() else {}
    if where == "PATH":
        python.rename(python.with_name("python3"))
        environ = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    done = run_script(tmp_path, environ)
    if where == "none":
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("python3 cannot run kempner on ")
        assert "set KEMPNER_PYTHON to the path of its Python" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert "-P -m kempner supervise train.toml --launcher srun;" in done.stdout


def test_a_container_is_the_ranks_and_kempner_is_looked_for_outside(tmp_path: Path) -> None:
    facts = Facts("/opt/conda/bin/python", "/opt/conda", {"APPTAINER_CONTAINER": "/i/train.sif"})
    found = recognise(facts)
    files = project_files(Site(found), read_templates())
    assert files["scripts/slurm/environment.sh"] == read_templates()["scripts/slurm/environment.sh"]
    (tmp_path / "train.toml").write_text(files["train.toml"])
    slurm = load(tmp_path / "train.toml").slurm
    assert slurm.python == "/opt/conda/bin/python"
    assert slurm.container.prefix == ["apptainer", "exec", "--nv", "/i/train.sif"]
    plain = project_files(Site(Environment("/e/bin/python")), read_templates())["train.toml"]
    assert "slurm" not in tomli.loads(plain)


def test_an_installed_kempner_writes_scripts_that_find_it_again(tmp_path: Path) -> None:
    """A virtual environment of its own, without a checkout, in a job that exports nothing."""
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "an env"]
    subprocess.run(command, check=True, timeout=scaled(60))
    python = tmp_path / "an env" / "bin" / "python"
    (packages,) = (tmp_path / "an env").glob("lib/python*/site-packages")
    seen = [sysconfig.get_path("purelib"), str(ROOT)]
    (packages / "installed.pth").write_text("\n".join(seen))
    made = subprocess.run(
        [python, "-m", "kempner", "init", tmp_path / "project"],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    )
    assert f"environment of a job: venv {tmp_path}/an env, {python}\n" in made.stdout
    (tmp_path / "project" / "tokenize.py").write_text("raise SystemExit('not the one of Python')")
    done = run_script(tmp_path / "project")
    assert done.returncode == 2
    assert done.stderr.startswith("kempner: this is not a Slurm job: submit scripts/slurm/")
