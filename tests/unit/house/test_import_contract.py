"""The rooms import only downwards, and what must run without torch does not lead to it.

`[tool.importlinter]` in pyproject.toml says so; here it holds for the tree as it is, and fails for
a copy of the tree in which it is broken.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli
from patience import scaled

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kempner"

CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}
"""The name of each contract by its id."""


@dataclass(frozen=True)
class Verdict:
    """What `lint-imports` said of a tree, and its exit code."""

    code: int
    said: str


# Each of the lines in turn stands in the copy that is the working directory, and is taken out
# again. One process for all: starting it costs more than a verdict.
LINTER = """
import contextlib, io, json, sys
from pathlib import Path
from importlinter.cli import lint_imports

verdicts = []
for module, line in json.load(sys.stdin):
    path = Path(module)
    path.parent.mkdir(exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    path.write_text(f"{before or ''}\\n{line}\\n", encoding="utf-8")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = lint_imports(no_cache=True, no_logo=True)
    verdicts.append((code, said.getvalue()))
    path.unlink() if before is None else path.write_text(before, encoding="utf-8")
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
json.dump(verdicts, sys.stdout)
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """The contract's verdict on a copy of the package with each violation alone, and with none."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, copy / "kempner", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    planted = [(v.module, v.line) for v in VIOLATIONS]
    done = subprocess.run(
        [sys.executable, "-c", LINTER],
        input=json.dumps([("kempner/__init__.py", ""), *planted]),
        cwd=copy,
        env={**os.environ, "COLUMNS": "200"},  # a wrapped line would hide the names
        stdout=subprocess.PIPE,
        text=True,
        timeout=scaled(200),
        check=True,
    )
    names = ["", *(v.name for v in VIOLATIONS)]
    told = [Verdict(*verdict) for verdict in json.loads(done.stdout)]
    return dict(zip(names, told, strict=True))


def test_the_tree_keeps_the_contract(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts[""]

    assert verdict.code == 0, verdict.said
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in verdict.said


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
        "import kempner.model.spec.shape",
        "house",
        "kempner.config.loading -> kempner.model.spec.shape",
    ),
    Planted(
        "sideways",
        "kempner/run/record/run_dir.py",
        "from kempner.cluster import world",
        "house",
        "kempner.run.record.run_dir -> kempner.cluster.world",
    ),
    Planted(
        "upwards in a function",
        "kempner/model/spec/shape.py",
        "def _lazily() -> None:\n    import kempner.insight",
        "house",
        "kempner.model.spec.shape -> kempner.insight",
    ),
    Planted("room without a floor", "kempner/attic/__init__.py", "", "house", "- kempner.attic"),
    Planted(
        "torch",
        "kempner/checkpoint/format/names.py",
        "import torch",
        "torch-free",
        "kempner.checkpoint.format.names -> torch",
    ),
    Planted(
        "torch in a new module",
        "kempner/supervisor/nodes/planted.py",
        "from torch.distributed import TCPStore",
        "torch-free",
        "kempner.supervisor.nodes.planted -> torch",
    ),
    Planted(
        "torch through another room",
        "kempner/insight/planted.py",
        "from kempner.model import transformer",
        "torch-free",
        "kempner.insight.planted -> kempner.model.transformer",
    ),
    Planted(
        "the record talks",
        "kempner/run/record/ledger.py",
        "from kempner.run.control import protocol",
        "run",
        "kempner.run.record.ledger -> kempner.run.control.protocol",
    ),
    Planted(
        "the machines know the cluster",
        "kempner/lab/machines.py",
        "from kempner.lab import cluster",
        "lab",
        "kempner.lab.machines -> kempner.lab.cluster",
    ),
    Planted(
        "the network asks Slurm",
        "kempner/cluster/network/ports.py",
        "from kempner.cluster.slurm import scontrol",
        "cluster",
        "kempner.cluster.network.ports -> kempner.cluster.slurm.scontrol",
    ),
    Planted(
        "token files that prepare",
        "kempner/data/files/index.py",
        "from kempner.data.prepare import sources",
        "data",
        "kempner.data.files.index -> kempner.data.prepare.sources",
    ),
    Planted(
        "a format that commits",
        "kempner/checkpoint/format/names.py",
        "from kempner.checkpoint.store import commit",
        "checkpoint",
        "kempner.checkpoint.format.names -> kempner.checkpoint.store.commit",
    ),
    Planted(
        "a policy that acts",
        "kempner/supervisor/policy/restart.py",
        "from kempner.supervisor.slurm import requeue_job",
        "supervisor",
        "kempner.supervisor.policy.restart -> kempner.supervisor.slurm.requeue_job",
    ),
    Planted(
        "a vote that loops",
        "kempner/training/vote.py",
        "from kempner.training import loop",
        "training",
        "kempner.training.vote -> kempner.training.loop",
    ),
]


@pytest.mark.parametrize("planted", VIOLATIONS, ids=lambda planted: planted.name)
def test_a_planted_violation_breaks_its_contract_alone(
    planted: Planted, verdicts: dict[str, Verdict]
) -> None:
    verdict = verdicts[planted.name]

    assert verdict.code == 1, verdict.said
    for contract, name in CONTRACTS.items():
        state = "BROKEN" if contract == planted.breaks else "KEPT"
        assert f"{name} {state}" in verdict.said
    assert planted.named in verdict.said


def test_every_contract_has_a_violation_planted() -> None:
    assert {planted.breaks for planted in VIOLATIONS} == CONTRACTS.keys()


ROOMS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_init_holds_no_code(room: str) -> None:
    """Otherwise importing a torch-free module would run whatever its package imports."""
    statements = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body

    assert all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in statements
    )
