"""The rooms import only downwards, and what must run without torch does not lead to it.

`[tool.importlinter]` in pyproject.toml says so; here it holds for the tree as it is, and fails for
a copy of the tree in which it is broken.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kempner"

FLOORS = "A room imports only from the floors below its own"
TORCH_FREE = "What must run without torch does not lead to it"


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """The contract's verdict on the package in `tree`, found through the working directory."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=tree,
        env={**os.environ, "COLUMNS": "200"},  # a wrapped line would hide the names
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package and of the contract."""
    shutil.copytree(PACKAGE, tmp_path / "kempner", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_tree_keeps_the_contract(copy: Path) -> None:
    verdict = lint(copy)

    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "Contracts: 2 kept, 0 broken." in verdict.stdout


@dataclass(frozen=True)
class Planted:
    """A line appended to a module, the contract that it breaks, and what the verdict names."""

    name: str
    module: str
    line: str
    breaks: str
    named: str


VIOLATIONS = [
    Planted(
        "upwards",
        "kempner/config/loading.py",
        "import kempner.model.sizes",
        FLOORS,
        "kempner.config.loading -> kempner.model.sizes",
    ),
    Planted(
        "sideways",
        "kempner/run/layout.py",
        "from kempner.cluster import world",
        FLOORS,
        "kempner.run.layout -> kempner.cluster.world",
    ),
    Planted(
        "upwards in a function",
        "kempner/model/sizes.py",
        "def _lazily() -> None:\n    import kempner.insight",
        FLOORS,
        "kempner.model.sizes -> kempner.insight",
    ),
    Planted("room without a floor", "kempner/attic/__init__.py", "", FLOORS, "- kempner.attic"),
    Planted(
        "torch",
        "kempner/checkpoint/layout.py",
        "import torch",
        TORCH_FREE,
        "kempner.checkpoint.layout -> torch",
    ),
    Planted(
        "torch in a new module",
        "kempner/supervisor/planted.py",
        "from torch.distributed import TCPStore",
        TORCH_FREE,
        "kempner.supervisor.planted -> torch",
    ),
    Planted(
        "torch through another room",
        "kempner/insight/planted.py",
        "from kempner.model import transformer",
        TORCH_FREE,
        "kempner.insight.planted -> kempner.model.transformer",
    ),
]


@pytest.mark.parametrize("planted", VIOLATIONS, ids=lambda planted: planted.name)
def test_a_planted_violation_breaks_its_contract_alone(planted: Planted, copy: Path) -> None:
    path = copy / planted.module
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{planted.line}\n")

    verdict = lint(copy)

    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    for contract in (FLOORS, TORCH_FREE):
        state = "BROKEN" if contract == planted.breaks else "KEPT"
        assert f"{contract} {state}" in verdict.stdout
    assert planted.named in verdict.stdout


@pytest.mark.parametrize("room", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_a_room_s_init_holds_no_code(room: Path) -> None:
    """Otherwise importing a torch-free module would run whatever its package imports."""
    statements = ast.parse(room.read_text(encoding="utf-8")).body

    assert all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in statements
    )
