"""Every ready configuration, on the nodes that it is meant for: fits, and is bound by compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kempner.config.loading import load
from kempner.training.plan.plan import plan

FOLDER = Path(__file__).parents[4] / "configs/train"
READY = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "debug")
MEANT = re.compile(r"Meant for (\d+) nodes? of (\d+) GPUs of (?:80|141) GB")
TAKES = re.compile(r"A step takes (\d+) s on (H[12]00)s by `kempner plan`")
TABLE = (Path(__file__).parents[4] / "docs/models.md").read_text()


@pytest.mark.parametrize("name", READY)
def test_it_fits_and_computes_for_longer_than_it_waits(name: str) -> None:
    path = FOLDER / f"{name}.toml"
    header = path.read_text().replace("\n#", "")
    meant, takes = MEANT.search(header), TAKES.search(header)
    assert meant is not None
    assert takes is not None
    nodes, gpus = map(int, meant.groups())
    made = plan(load(path), nodes * gpus, nodes, gpu=takes[2])
    assert made.fits
    assert made.speed.time.bound == "compute"
    assert made.speed.time.between_nodes < 0.1 * made.speed.time.total
    assert round(made.speed.time.total) == int(takes[1])
    assert re.search(rf"^\| `{name}\.toml` .* {takes[1]} s \|$", TABLE, re.MULTILINE)
    assert 0.3 < made.speed.mfu < 0.6
    assert made.flops.traced == made.flops.by_formula
    assert made.sent.traced == made.sent.by_formula
