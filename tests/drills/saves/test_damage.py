"""Whatever is damaged in a checkpoint is noticed, named, and not loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from drill import SMALLEST, resume_each
from drilling import SEED, note
from harness import Run

from kempner.checkpoint.format.manifest import BLOCK_BYTES
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(300)

FLIPS = 100
GOOD, NEWEST = 3, 6
TWO_BLOCKS = ("--model.dim=64", "--model.n_heads=2", "--model.ffn_dim=800")
SAVES = (
    "--train.max_steps=6",
    "--checkpoint.interval=3",
    *SMALLEST[1:2],
    *SMALLEST[4:],
    *TWO_BLOCKS,
)


@dataclass(frozen=True)
class Damage:
    """What is done to the newest checkpoint, and what must be said of it."""

    what: str
    do: Callable[[Path], object]
    words: str


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """Two checkpoints of two ranks, with more than one block in each data file."""
    run = Run(tmp_path_factory.mktemp("saved") / "run", corpus)
    run.complete(2, *SAVES)
    assert run.committed() == [GOOD, NEWEST]
    data = (run.checkpoints / "latest").glob("*.distcp")
    assert all(path.stat().st_size > BLOCK_BYTES for path in data)
    return run


def flip(checkpoint: Path, name: str, bit: int) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (checkpoint / name).write_bytes(content)


def flips(checkpoint: Path, random: Random) -> list[Damage]:
    """Half of them over all bytes, half over all files: the small ones count as well."""
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    chosen = []
    for number in range(FLIPS):
        weights = list(sizes.values()) if number % 2 else None
        (name,) = random.choices(list(sizes), weights)
        bit = random.randrange(8 * sizes[name])
        words = re.escape(name)
        if name.endswith(".distcp"):
            words = rf"rank \d: {words}: block {bit // 8 // BLOCK_BYTES} "
        chosen.append(
            Damage(f"bit {bit} of {name}", lambda c, name=name, bit=bit: flip(c, name, bit), words)
        )
    return chosen


def ruins(checkpoint: Path) -> list[Damage]:
    """Every file shorter, empty, full of zeros, and missing."""

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def blank(path: Path) -> None:
        path.write_bytes(bytes(path.stat().st_size))

    ways = (cut, lambda path: path.write_bytes(b""), blank, lambda path: path.unlink())
    return [
        Damage(f"way {number} for {name}", lambda c, way=way, name=name: way(c / name), words)
        for name in sorted(path.name for path in checkpoint.iterdir())
        for number, way in enumerate(ways)
        # Without a manifest there is no checkpoint, and nothing to be said of its files.
        for words in ["" if (name, number) == ("manifest.json", 3) else re.escape(name)]
    ]


def copies(saved: Run, folder: Path, damages: list[Damage]) -> list[RunDirectory]:
    runs = []
    for number, damage in enumerate(damages):
        runs.append(RunDirectory(folder / f"run-{number}"))
        shutil.copytree(saved.checkpoints, runs[-1].checkpoints, symlinks=True)
        damage.do(CheckpointFolder(runs[-1].checkpoints).step(NEWEST))
    return runs


def test_no_flipped_bit_and_no_ruined_file_is_loaded(saved: Run, tmp_path: Path) -> None:
    newest = CheckpointFolder(saved.checkpoints).step(NEWEST)
    damages = flips(newest, Random(SEED)) + ruins(newest)
    runs = copies(saved, tmp_path, damages)
    assert all(verify(CheckpointFolder(run.checkpoints).step(NEWEST)) for run in runs)
    steps = resume_each(saved.config, SAVES, [str(run.path) for run in runs])
    loaded = [damage.what for damage, step in zip(damages, steps, strict=True) if step != GOOD]
    note("flipped bits", flips=FLIPS, ruins=len(damages) - FLIPS, loaded=loaded)
    assert not loaded
    for damage, run in zip(damages, runs, strict=True):
        events = [e for e in read_lines(run.ledger) if e["event"] == "checkpoint_damaged"]
        assert len(events) == bool(damage.words), damage.what
        assert all(re.search(damage.words, " ".join(event["damage"])) for event in events), events
        assert CheckpointFolder(run.checkpoints).latest() == GOOD


def test_two_ranks_fall_back_together(saved: Run, run: Run) -> None:
    shutil.copytree(saved.checkpoints, run.checkpoints, symlinks=True)
    flip(run.checkpoints / "latest", "__1_0.distcp", 8 * 1000)
    run.complete(2, *SAVES)
    (event,) = run.events("checkpoint_damaged")
    assert "__1_0.distcp: block 0 " in " ".join(event["damage"])
    assert [event["step"] for event in run.events("resumed")] == [GOOD]
    saved_steps = {step: loss for step, loss in saved.steps().items() if step > GOOD}
    assert run.steps() == saved_steps


def test_a_latest_that_dangles_or_points_outside(saved: Run, tmp_path: Path) -> None:
    links = {
        "step-00000005": GOOD,
        "step-00000009": NEWEST,
        "/nowhere/step-00000006": NEWEST,
        "../../step-00000003": NEWEST,
    }
    relinked = [
        Damage(text, lambda c, text=text: relink(c.with_name("latest"), text), "") for text in links
    ]
    runs = copies(saved, tmp_path, relinked)
    assert resume_each(saved.config, SAVES, [str(run.path) for run in runs]) == [*links.values()]
    assert [CheckpointFolder(run.checkpoints).latest() for run in runs] == [*links.values()]
    note("a link that names no checkpoint", resumed_at=links)


def relink(latest: Path, text: str) -> None:
    latest.unlink()
    latest.symlink_to(text)
