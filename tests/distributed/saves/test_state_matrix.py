"""What `survive` holds: every kind of state, however the model is divided, or one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import ROOT, drills, launch

MATRIX, WORLD = Path(__file__).with_name("state_matrix.py"), 4

pytestmark = pytest.mark.timeout(300)

KINDS = {
    "model": "the model",
    "optimizer": "its optimizer",
    "critic": "another model",
    "critic_optimizer": "another optimizer",
    "quadratic": "a module that is not sharded",
    "lbfgs": "LBFGS",
    "ema": "averaged weights (`AveragedModel`)",
    "schedule": "a scheduler",
    "plateau": "`ReduceLROnPlateau`",
    "scaler": "`GradScaler`",
    "counter": "any object with `state_dict`",
    "best": "a dict",
    "order": "a list",
    "running": "a tensor",
    "table": "a NumPy array",
    "draws": "`torch.Generator`",
    "python": "`random.Random`",
    "numpy": "`numpy.random.Generator`",
    "old_numpy": "`numpy.random.RandomState`",
    "mine": "an object that differs on each rank",
    "own_buffer": "a tensor that differs on each rank",
    "own_draws": "a generator that differs on each rank",
}
"""As `docs/own_loop.md` has them."""

REFUSED = {
    "a number": "register a dict that holds it",
    "an object": "give it the methods state_dict and load_state_dict",
    "a function in a state": r"\['deep'\]\['deep'\]\[0\] is of type builtin_function_or_method",
    "objects in an array": "an array of objects",
    "a sparse tensor": "a tensor without memory of its own",
    "a module per rank": "register modules and optimizers as state",
    "a name twice": "is in state and in per_rank",
    "no name": "is no name for it",
}


def found(folder: Path, wrapper: str) -> list[dict[str, dict[str, object]]]:
    launch(MATRIX, WORLD, folder, wrapper)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("wrapper", ["ddp", "tensor", *drills("fsdp2", "hsdp")])
def test_all_kinds_come_back_to_the_bit_or_are_refused_at_the_first_line(
    wrapper: str, tmp_path: Path
) -> None:
    by_rank = found(tmp_path, wrapper)
    for rank in by_rank:
        assert rank["equal"] == dict.fromkeys(KINDS, True)
    refused = by_rank[0]["refused"]
    assert refused.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert re.search(words, str(refused[name])), refused[name]


@pytest.mark.parametrize(
    ("wrapper", "words"),
    drills(
        ("submesh", "sharded over a mesh of the ranks 0, 2"),
        ("fsdp1", "FullyShardedDataParallel are not supported; fully_shard is"),
        ("fsdp1-original", "FullyShardedDataParallel are not supported; fully_shard is"),
    ),
)
def test_what_cannot_be_held_is_refused_whole(wrapper: str, words: str, tmp_path: Path) -> None:
    for rank in found(tmp_path, wrapper):
        assert words in str(rank["whole"])


def test_the_page_lists_these_kinds() -> None:
    page = (ROOT / "docs/own_loop.md").read_text()
    table = re.findall(r"^\| ([^|]+) \| (?:held|yes)[^|]*\|", page, re.M)
    assert [row for row in KINDS.values() if row not in table] == []
