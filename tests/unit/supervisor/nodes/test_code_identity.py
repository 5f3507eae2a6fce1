"""The code that nodes run is compared: a node with other code than the rest is named."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

import kempner
from kempner.probe.node import CodeIdentity, code_identity, other_code

A, B, C = (CodeIdentity("3.11.2", digit * 64, "2.13.0") for digit in "abc")
OLD = CodeIdentity("3.11.2", "a" * 64, "2.9.1")


def test_any_change_of_a_file_is_seen_and_its_place_is_not(tmp_path: Path) -> None:
    package = tmp_path / "kempner"
    shutil.copytree(Path(kempner.__file__).parent, package)
    same = code_identity(package)
    assert same == code_identity()
    assert same.torch == version("torch")
    (package / "added.py").touch()
    added = code_identity(package)
    (package / "added.py").rename(package / "moved.py")
    moved = code_identity(package)
    (package / "moved.py").unlink()
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.swapcase())
    assert len({same, added, moved, code_identity(package)}) == 4


@pytest.mark.parametrize(
    ("found", "other"),
    [
        ({"node1": A, "node2": A}, {}),
        ({"node1": A}, {}),
        ({}, {}),
        ({"node1": A, "node2": B, "node3": B}, {"node1": (A, B)}),
        ({"node1": A, "node2": B}, {"node2": (B, A)}),
        ({"node1": A, "node2": OLD, "node3": A}, {"node2": (OLD, A)}),
        ({"node1": A, "node2": B, "node3": C}, {"node2": (B, A), "node3": (C, A)}),
    ],
)
def test_the_code_of_most_nodes_counts_and_of_equals_the_first_ones(
    found: dict[str, CodeIdentity], other: dict[str, tuple[CodeIdentity, CodeIdentity]]
) -> None:
    said = other_code(found, "node1")
    assert said == {
        node: f"it runs {its}, and the other nodes {usual}" for node, (its, usual) in other.items()
    }
