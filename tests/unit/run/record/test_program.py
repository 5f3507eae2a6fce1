"""The program of a run: its command, the variables that it reads, its files, and their copies."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from kempner.run.record.program import (
    command_of_process,
    command_of_words,
    counts,
    digests,
    identity_of_process,
    identity_of_words,
    keep_copies,
    named_files,
    own_sources,
)
from kempner.run.record.run_dir import RunDirectory

HERE = Path("/work place/project")


def main_module(name: str | None = None, file: Path | None = None) -> ModuleType:
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    if file is not None:
        main.__file__ = str(file)
    return main


@pytest.mark.parametrize(
    ("words", "name", "argv", "command"),
    [
        (("python", "train.py"), None, ["train.py"], ("train.py",)),
        (("python", "-u", "train.py", "1"), None, ["train.py", "1"], ("train.py", "1")),
        (("python3", "./train.py"), None, ["./train.py"], ("train.py",)),
        (("python", "../a/train.py"), None, ["../a/train.py"], ("../a/train.py",)),
        (("python", f"{HERE}/a/train.py"), None, [f"{HERE}/a/train.py"], ("a/train.py",)),
        (
            ("python", "t.py", f"--out={HERE}/o"),
            None,
            ["t.py", f"--out={HERE}/o"],
            ("t.py", "--out=o"),
        ),
        (("python", "t.py", "--out=/o"), None, ["t.py", "--out=/o"], ("t.py", "--out=/o")),
        (("python", "t.py", "--resume", "1"), None, ["t.py", "--resume", "1"], ("t.py", "1")),
        (("python", "t.py", "--auto-resume=x"), None, ["t.py"], ("t.py",)),
        (
            ("python", "t.py", "--resume_from_checkpoint", "out/c-3", "--lr", "1"),
            None,
            ["t.py", "--resume_from_checkpoint", "out/c-4", "--lr", "1"],
            ("t.py", "--lr", "1"),
        ),
        (
            ("python", "t.py", "--resume-from", "--lr=1"),
            None,
            ["t.py", "--lr=1"],
            ("t.py", "--lr=1"),
        ),
        (("python", "t.py"), None, ["t.py", "--local-rank=0"], ("t.py",)),
        (("torchrun", "--nnodes", "1", "t.py", "x"), None, ["t.py", "x"], ("t.py", "x")),
        (
            ("python", "-m", "pack.train", "x"),
            "pack.train",
            ["/p/train.py", "x"],
            ("-m", "pack.train", "x"),
        ),
        (
            ("python", "-m", "pack", "x"),
            "pack.__main__",
            ["/p/__main__.py", "x"],
            ("-m", "pack", "x"),
        ),
    ],
)
def test_the_command_is_the_same_from_inside_and_from_outside(
    words: tuple[str, ...], name: str | None, argv: list[str], command: tuple[str, ...]
) -> None:
    assert command_of_words(words, HERE) == command
    assert command_of_process(argv, main_module(name), HERE) == command


def test_without_a_program_of_python_it_is_all_of_it() -> None:
    assert command_of_words(("bash", f"{HERE}/run.sh", "3"), HERE) == ("bash", "run.sh", "3")
    assert command_of_process(["-c"], main_module(), HERE) == ()


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        *((name, True) for name in ("SEED", "LR", "FOLD", "DATA", "DATA_DIR", "LORA_RANK")),
        *((name, True) for name in ("OUTER_LR", "LOGIT_SCALE", "KEY_DIM", "LOCAL_BATCH", "seed")),
        *((name, False) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HOME")),
        *((name, False) for name in ("SLURM_JOB_ID", "KEMPNER_RUN_DIR", "CUDA_VISIBLE_DEVICES")),
        *((name, False) for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "TMPDIR", "USER")),
        *(
            (name, False)
            for name in ("OUT", "OUTPUT_DIR", "OUTDIR", "LOG_LEVEL", "PORT", "START_TIME")
        ),
        *(
            (name, False)
            for name in ("HF_TOKEN", "API_KEY", "DB_PASSWORD", "NUM_WORKERS", "MY_CACHE")
        ),
    ],
)
def test_the_variables_that_count(name: str, counted: bool) -> None:
    assert counts(name) is counted


MAIN = """
import os, json
from os import environ, getenv
import pack.model as m
from pack import data
a, b, c = os.environ["A"], os.environ.get("B", "1"), os.getenv("C")
d, e = getenv("D"), environ["E"]
if "F" in os.environ: pass
os.environ["SET"] = "1"; os.environ.setdefault("DEFAULT", "1")
print(os.environ["SET"], os.environ["DEFAULT"], os.environ[a], os.environ["HOME"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "train.py": MAIN,
        "pack/__init__.py": "",
        "pack/model.py": "from .inner import layers\nfrom .. import top\nimport os\nos.getenv('M')",
        "pack/data.py": "this is no Python",
        "pack/inner/layers.py": "import os\nos.environ['DEEP']",
        "other.py": "import os\nos.environ['NEVER']",
        ".venv/lib/python3/site-packages/json2.py": "",
        "config.toml": "x = 1",
        ".secret": "hidden",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_program_leads_to_its_files_and_its_variables(project: Path) -> None:
    script = project / "train.py"
    files = {
        "train.py",
        "pack/__init__.py",
        "pack/model.py",
        "pack/data.py",
        "pack/inner/layers.py",
    }
    assert set(own_sources(script, project)) == files
    values = {"A": "1", "B": "/elsewhere/of/job-7/b", "M": "m", "NEVER": "0"}
    told = {"A": "1", "B": "b", "C": None, "D": None, "E": None, "F": None, "M": "m", "DEEP": None}
    words = ["train.py", "--config=config.toml", ".secret"]
    modules = {
        "__main__": main_module(file=script),
        "other": main_module(file=project / "other.py"),
        "sys": sys,  # has no file
        "json2": main_module(file=project / ".venv/lib/python3/site-packages/json2.py"),
    }
    inside = identity_of_process(words, modules, values, project)
    outside = identity_of_words(["python", *words], values, project)
    assert inside.environment == outside.environment == told
    assert set(inside.files) == files | {"other.py", "config.toml"}
    assert inside.command == outside.launched


def test_a_file_that_changes_has_another_digest(project: Path) -> None:
    files = named_files(["config.toml", "--x=train.py", "no such file", ""], project)
    before = digests(files)
    assert set(before) == {"config.toml", "train.py"}
    (project / "config.toml").write_text("x = 2")
    assert {n for n in before if before[n] != digests(files)[n]} == {"config.toml"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_git_tracks_is_copied_once_for_each_content_for_the_owner_alone(project: Path) -> None:
    run = RunDirectory(project / "runs" / "train")
    run.path.mkdir(parents=True)
    files = own_sources(project / "train.py", project) | {".secret": project / ".secret"}
    (project / "pack" / "data.py").write_bytes(b"#" * (5 << 20))
    keep_copies(run, files)
    assert not run.program.exists()  # no repository
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project))
    subprocess.run([*git, "init", "-q"], check=True)
    tracked = ["train.py", "pack/data.py", "pack/model.py", ".secret"]
    subprocess.run([*git, "add", "-f", *tracked], check=True)

    for _ in range(2):
        keep_copies(run, files)
        copies = sorted(path.name.partition("-")[2] for path in run.program.iterdir())
        assert copies == ["model.py", "train.py"]
    (project / "train.py").write_text("changed")
    keep_copies(run, files)
    contents = [path.read_text() for path in run.program.glob("*-train.py")]
    assert sorted(contents) == sorted([MAIN, "changed"])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run.program.iterdir()}
    assert modes == {0o600}
