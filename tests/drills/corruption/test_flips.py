"""360 bits that flip, in memory and in computations, once and for good, on a rank and on a node:
what is found, when, and who is named; and steps without any."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from drilling import SEED, note
from harness import drills, launch

pytestmark = pytest.mark.timeout(1800)

PROGRAM = Path(__file__).parents[2] / "distributed/programs/corruption.py"
PLACES = ("weights", "moments", "inputs", "activations", "gradients", "reduced", "update")
FLIPS, LAST = 30, 6
WORLDS = {
    "three nodes": (3, 1, 1),
    "three nodes of two ranks": (6, 2, 1),
    "two ranks": (2, 1, 1),
    "two replicas of two nodes": (4, 1, 2),
    "three replicas of two ranks": (6, 2, 3),
}
"""Ranks, those of a node, and replicas."""
PARTS = [("three nodes", part) for part in range(7)]
PARTS += [("three nodes of two ranks", part) for part in range(2)] + [("two ranks", 0)]
PARTS += [("two replicas of two nodes", 0), ("three replicas of two ranks", 0)]
SOUND = [("three nodes", part) for part in range(5)]
SOUND_STEPS = 2000


def faults_of(world: str, part: int) -> list[dict[str, Any]]:
    """What is computed wrong once is looked for in the same step, everything else at intervals."""
    draw = random.Random(f"{SEED} {world} {part}")
    ranks, per_node, replicas = WORLDS[world]
    places = (*PLACES, "added") if replicas > 1 else PLACES
    found = []
    for number in range(FLIPS):
        where, sticking = places[number % len(places)], bool(draw.getrandbits(1))
        node = draw.randrange(ranks // per_node)
        on_it = [node * per_node + local for local in range(per_node)]
        once = not sticking and where not in ("weights", "moments")
        fault = {
            "where": where,
            "bit": draw.randrange(32),
            "element": draw.randrange(1 << 30),
            "sticking": sticking,
            "ranks": on_it if draw.getrandbits(1) else [draw.choice(on_it)],
            "step": draw.randrange(2, 4),
            "interval": 1 if once else draw.choice((1, 2, 3)),
        }
        found.append(fault)
    return found


def outcomes(world: str, out: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    ranks, per_node, replicas = WORLDS[world]
    asked |= {"replicas": replicas}
    launch(PROGRAM, ranks, out, per_node, json.dumps(asked), deadline=1700)
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(("world", "part"), [PARTS[0], *drills(*PARTS[1:])])
def test_bits_that_flip_are_found_and_who_lies_is_named(
    world: str, part: int, tmp_path: Path
) -> None:
    """Of two ranks no third one can say which lies for good: then both are named, as not sure."""
    asked = {"faults": faults_of(world, part), "last": LAST}
    found = outcomes(world, tmp_path / "found.json", asked)
    mattered = [each for each in found if each["changed"]]
    in_time = [each for each in mattered if _in_time(each)]
    sticking = [each for each in in_time if each["fault"]["sticking"]]
    named = [each for each in sticking if _is_named(each, WORLDS[world][1])]
    note(
        "flips",
        world=world,
        flips=len(found),
        mattered=len(mattered),
        found=len(in_time),
        sticking=len(sticking),
        named=len(named),
    )
    assert len(found) == FLIPS
    assert mattered
    assert in_time == mattered
    assert world == "two ranks" or named == sticking
    assert [each for each in in_time if not _tells_of_it(each)] == []


def _in_time(outcome: dict[str, Any]) -> bool:
    """Within the interval: what sticks in weights or moments, or flips there, is found at once."""
    fault, step = outcome["fault"], outcome["found"]
    return step is not None and step - fault["step"] < fault["interval"]


def _tells_of_it(outcome: dict[str, Any]) -> bool:
    """Names ranks of the fault, if it is sure no other; of two ranks that flip a bit once, one may
    have been rounded away."""
    ranks, verdict = {*outcome["fault"]["ranks"]}, outcome["verdict"]
    told = {*verdict["ranks"]}
    return told <= ranks if verdict["sure"] else bool(told & ranks)


def _is_named(outcome: dict[str, Any], per_node: int) -> bool:
    """Of a replica that lies as a whole the node is, if it is on one."""
    verdict = outcome["verdict"]
    nodes = {rank // per_node for rank in verdict["ranks"]}
    known = verdict["sure"] or len(nodes) == 1
    return known and verdict["ranks"] == outcome["fault"]["ranks"]


@pytest.mark.parametrize(("world", "part"), drills(*SOUND))
def test_no_step_is_found_wrong_that_is_not(world: str, part: int, tmp_path: Path) -> None:
    found = outcomes(world, tmp_path / "found.json", {"steps": SOUND_STEPS, "first": part})
    note("no flips", world=world, steps=SOUND_STEPS, found=len(found))
    assert found == []
