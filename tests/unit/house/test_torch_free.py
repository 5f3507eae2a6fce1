"""The side of kempner that runs on a batch host imports no torch and needs none installed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import tomli
from harness import write_tokens
from packaging.requirements import Requirement
from patience import scaled

import kempner
from kempner.checkpoint.format.manifest import (
    FileEntry,
    Identity,
    Manifest,
    TrainState,
    encode,
    whole_sum,
)
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder

ROOT = Path(__file__).parents[3]
ROOMS = ["cli", "cluster", "config", "insight", "jobs", "lab", "run", "supervisor"]

SOUND = "step-00000005: ok (world 1, 7 B)\n1 read, 0 damaged\n"

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

IMPORT_ALL = """
import importlib, pkgutil, sys
import kempner
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("kempner", "torch")))
"""


def torch_free_modules() -> list[str]:
    """What the import contract names, and the commands, which import torch only when they run."""
    contracts = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (contract for contract in contracts if contract["id"] == "torch-free")
    return [*contract["source_modules"], "kempner.cli"]


def requirements(name: str, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What the installed distribution requires here."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    for requirement in map(Requirement, distribution(name).requires or []):
        if not requirement.marker or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def everything_but_torch() -> Iterator[Distribution]:
    """What kempner requires, and what that requires in its turn, without torch."""
    seen = set()
    waiting = list(requirements("kempner"))
    while waiting:
        wanted = waiting.pop()
        if wanted.name == "torch" or str(wanted) in seen:
            continue
        seen.add(str(wanted))
        waiting += requirements(wanted.name, wanted.extras)
        yield distribution(wanted.name)


def link(found: Distribution, site: Path) -> None:
    """Puts every top-level file and package of the distribution into `site` as a link."""
    for name in {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}:
        source = Path(str(found.locate_file(name)))
        if name != "__pycache__" and not (site / name).exists():
            (site / name).symlink_to(source)


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs Python with the arguments given in an environment that lacks torch and nothing else.

    A virtual environment with links to what kempner requires, so that processes started from
    there (`sys.executable`) lack torch as well.
    """
    folder = tmp_path_factory.mktemp("without-torch")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in everything_but_torch():
        link(found, site)
    (site / "kempner").symlink_to(ROOT / "kempner")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [folder / "bin" / "python", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "debug.toml"
    path.write_text("[train]\nmax_steps = 5\n[model]\nvocab_size = 257\n")
    return path


def test_importing_the_torch_free_side_leaves_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *torch_free_modules()],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "torch" not in imported
    for room in ROOMS:
        modules = (ROOT / "kempner" / room).rglob("[!_]*.py")
        names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules}
        assert names
        assert names <= set(imported)


IMPORT_NAME = """
import sys
import kempner
assert "torch" not in sys.modules
assert not any(name.startswith("kempner.") for name in sys.modules)
print(getattr(kempner, sys.argv[1]).__module__, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "home", "needs_torch"),
    [
        ("survive", "kempner.training.survive", True),
        ("CheckpointManager", "kempner.training.by_hand", True),
        ("ShutdownHandler", "kempner.training.by_hand", True),
        ("RunError", "kempner.run.process.exit_codes", False),
    ],
)
def test_a_public_name_is_imported_when_it_is_used(name: str, home: str, needs_torch: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_NAME, name],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [home, str(needs_torch)]


def test_the_public_names_are_listed_and_others_refused() -> None:
    assert set(kempner.__all__) <= set(dir(kempner))
    with pytest.raises(AttributeError, match="has no attribute 'survive_all'"):
        _ = kempner.survive_all  # type: ignore[attr-defined]


def test_torch_would_have_been_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "kempner.model.transformer"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    )

    assert "torch" in done.stdout.split()


def test_the_environment_lacks_torch_and_only_torch(without_torch: Runner) -> None:
    missing = without_torch("-c", "import torch")
    present = without_torch(
        "-c", "import kempner, numpy, pydantic, tokenizers; print(kempner.__file__)"
    )

    assert missing.returncode == 1
    assert "ModuleNotFoundError: No module named 'torch'" in missing.stderr
    assert present.returncode == 0, present.stderr


def test_the_torch_free_side_imports_without_torch(without_torch: Runner) -> None:
    done = without_torch("-c", IMPORT_ALL, *torch_free_modules())

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--version", "kempner "),
        ("--help", "supervise"),
        ("-h", "supervise"),
        ("", "supervise"),
        ("supervise -h", "--nproc"),
        ("checkpoint verify -h", "--help"),
        ("config explain max_steps", "Number of optimizer steps in the whole run."),
        ("supervise --help", "--nproc"),
        ("train --help", "CONFIG"),
        ("checkpoint --help", "verify"),
    ],
)
def test_a_command_works_without_torch(arguments: str, said: str, without_torch: Runner) -> None:
    done = without_torch("-m", "kempner", *arguments.split())

    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_configuration_is_checked_and_shown_without_torch(
    without_torch: Runner, config: Path, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "tokens", [range(257)] * 4)
    given = ("--train.max_steps=7", f"--data.dataset_path={tmp_path}/tokens")
    checked = without_torch("-m", "kempner", "config", "check", config, *given)
    shown = without_torch("-m", "kempner", "config", "show", config)
    refused = without_torch("-m", "kempner", "config", "check", config, "--train.max_steps=0")

    assert (checked.returncode, shown.returncode, refused.returncode) == (0, 0, 2)
    assert checked.stdout.startswith(f"ok: {config}: run runs/debug, 7 steps of 8,192 tokens, ")
    assert tomli.loads(shown.stdout)["train"]["max_steps"] == 5
    assert "train.max_steps must be above 0" in refused.stderr


def test_a_checkpoint_is_verified_without_torch(without_torch: Runner, tmp_path: Path) -> None:
    content = b"weights"
    identity = Identity(
        world=1,
        mesh={},
        seed=0,
        data_fingerprint="",
        model={},
    )
    files = {".metadata": FileEntry(bytes=len(content), xxh3_128=whole_sum(content))}
    manifest = Manifest(TrainState(step=5), identity, attempt=1, created=0.0, files=files)
    checkpoint = CheckpointFolder(tmp_path).step(5)
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(content)
    (checkpoint / MANIFEST).write_bytes(encode(manifest))

    whole = without_torch("-m", "kempner", "checkpoint", "verify", tmp_path)
    (checkpoint / ".metadata").write_bytes(b"weighty")
    damaged = without_torch("-m", "kempner", "checkpoint", "verify", tmp_path)

    assert (whole.returncode, whole.stdout) == (0, SOUND)
    assert damaged.returncode == 65
    assert "step-00000005: damaged" in damaged.stdout
