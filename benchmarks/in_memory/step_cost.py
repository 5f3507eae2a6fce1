"""What keeping each step in memory adds to a healthy step.

    python benchmarks/in_memory/step_cost.py [--ranks 2] [--rounds 20] [--seconds 3]

Four supervisors with their ranks train the same model and take turns of equal length, as in
`benchmarks/step_overhead.py`: `in memory` has `checkpoint.in_memory`, `buddy` `checkpoint.buddy`
as well, `plain` has neither, `control` is a second `plain`. Wall and processor time are ratios to
the `plain` of the same round. The buddy is the supervisor itself: both ends of what is sent count.
It stands still for three turns of four, which are no pause for it, so it gets a quarter of the
share of time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step_overhead import CONFIG, WARM_UP, Program, against, prepare, ratios
from two_loops import STORE_PORT, Turn

from kempner.config.sections import CheckpointSection

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

PROVES = ("kempner/checkpoint/slots", "kempner/supervisor/launchers/agents/buddy")

PLAIN, CONTROL = "kempner-plain", "kempner-control"
IN_MEMORY, BUDDY = "kempner-in-memory", "kempner-buddy"
NAMES = {IN_MEMORY: "checkpoint.in_memory", BUDDY: "and checkpoint.buddy", CONTROL: "neither"}
"""What the table calls those that are compared with the plain one."""


def measure(size: int, rounds: int, seconds: float, folder: Path) -> list[dict[str, object]]:
    """Let the four take turns; what each turn took, against the plain ones."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ[STORE_PORT] = str(store.port)
    programs: dict[str, Program] = {}
    walls: dict[str, list[float]] = {name: [] for name in (PLAIN, CONTROL, IN_MEMORY, BUDDY)}
    busy: dict[str, list[float]] = {name: [] for name in walls}
    try:
        for name in walls:
            programs[name] = Program(name, size, write_config(folder, name, size), store)
            programs[name].take(Turn(WARM_UP))
        wall, _, _ = programs[PLAIN].take(Turn(WARM_UP))
        steps = max(2, round(seconds * WARM_UP / wall))
        for number in range(rounds):
            for name in random.Random(number).sample(list(walls), len(walls)):
                wall, used, _ = programs[name].take(Turn(steps))
                walls[name].append(wall)
                busy[name].append(used)
        for program in programs.values():
            program.end()
    finally:
        for program in programs.values():
            program.kill()
    print(f"{size} ranks, {rounds} rounds of {steps} steps")
    return [
        {
            "ranks": size,
            "with": label,
            **against("processor time", ratios(busy[name], busy[PLAIN])),
            **against("wall", ratios(walls[name], walls[PLAIN])),
        }
        for name, label in NAMES.items()
    ]


def write_config(folder: Path, name: str, size: int) -> Path:
    """The configuration of one of them."""
    path = folder / f"{name}.toml"
    text = CONFIG.format(folder=folder, micro=16 // size).replace('"overhead"', f'"{name}"')
    kept = "interval = 1000000"
    if name in (IN_MEMORY, BUDDY):
        kept += "\nin_memory = true"
    if name == BUDDY:
        kept += f"\nbuddy = true\nbuddy_share = {CheckpointSection().buddy_share / 4}"
    path.write_text(text.replace("interval = 1000000", kept))
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0)
    records.add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), arguments.ranks)
        rows = measure(arguments.ranks, arguments.rounds, arguments.seconds, Path(folder))
    records.result(arguments.record, "steps in memory", PROVES, rows)


if __name__ == "__main__":
    main()
