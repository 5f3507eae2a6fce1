"""What the same programs do without kempner: started again by hand after three signals and a kill.

    python tests/distributed/integrations/alone.py

prints a row for each: the table of docs/integrations.md. One process, 96 samples in an order of its
own in each of three epochs, 2 x 4 samples a step, a checkpoint of its own every 5 steps, resumed as
its documentation says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

OWN, ROOT = Path(__file__).with_name("own"), Path(__file__).resolve().parents[3]
TROUBLES = "stop@16 stop@22 kill@27 stop@33"
PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "transformers Trainer": ("own_trainer.py", {"TRAINER": "Trainer"}),
    "TRL SFTTrainer": ("own_trainer.py", {"TRAINER": "SFTTrainer"}),
    "Lightning Trainer": ("own_lightning.py", {}),
    "Accelerate": ("own_accelerate.py", {}),
    "torchtitan": ("own_titan.py", {}),
}
EPOCH, STEPS = 12, 36


def train(folder: Path, script: str, settings: Mapping[str, str], troubles: str) -> int:
    """Start the program until it ends by itself; how often it was started."""
    folder.mkdir()
    mine = {"PLAIN": "1", "ACCUMULATION": "4", "TROUBLE": troubles, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **mine, **settings, "PYTHONPATH": f"{OWN}:{ROOT}"}
    for starts in range(1, 8):
        with open(folder / f"start-{starts}.out", "wb") as out:
            command = [sys.executable, OWN / script]
            subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=out, check=False
            )
        if (folder / "final-0.pt").exists():  # Lightning exits with 0 after a signal
            return starts
    raise SystemExit((folder / f"start-{starts}.out").read_text())


def notes(folder: Path) -> list[dict[str, Any]]:
    """What the program noted, in the order of time."""
    return [json.loads(line) for line in (folder / "notes-0.jsonl").read_text().splitlines()]


def counted(noted: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The micro batches of each step, of the last time that it was made."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in noted:
        steps.setdefault(line["step"], []).append(line)
    return {step: lines[-4:] for step, lines in steps.items()}


def wrong_samples(steps: Mapping[int, list[dict[str, Any]]]) -> tuple[int, int]:
    """How many samples come again within an epoch, and how many never come."""
    again = missed = 0
    for epoch in range(STEPS // EPOCH):
        seen: Counter[int] = Counter()
        for step in range(epoch * EPOCH + 1, (epoch + 1) * EPOCH + 1):
            for line in steps.get(step, []):
                seen.update(line["samples"])
        again += sum(count - 1 for count in seen.values())
        missed += 96 - len(seen)
    return again, missed


def main() -> None:
    print("program, workers | starts | steps made again | samples again | missed | losses, weights")
    for name, (script, more) in PROGRAMS.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        for workers in ("0", "2"):
            with tempfile.TemporaryDirectory() as folder:
                settings = {**more, "WORKERS": workers}
                calm, struck = Path(folder, "calm"), Path(folder, "struck")
                train(calm, script, settings, "")
                starts = train(struck, script, settings, TROUBLES)
                lines = notes(struck)
                steps, theirs = counted(lines), counted(notes(calm))
                lost = len(lines) / 4 - STEPS
                again, missed = wrong_samples(steps)
                losses = sum(
                    [a["loss"] for a in steps.get(s, [])] != [b["loss"] for b in theirs[s]]
                    for s in theirs
                )
                one, other = (torch.load(f / "final-0.pt") for f in (calm, struck))
                same = all(torch.equal(one[key], other[key]) for key in one)
                print(
                    f"{name}, {workers} | {starts} | {lost:.1f} | {again} | {missed} | "
                    f"{losses} of {STEPS} losses differ, weights {'equal' if same else 'differ'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
