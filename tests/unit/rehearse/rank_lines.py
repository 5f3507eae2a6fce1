"""What the ranks of a rehearsal write down, made up."""

from __future__ import annotations

import json
from typing import Any

from kempner.rehearse.compare import RankRecord, parse

STEPS = 20


def lines(
    first: int = 1,
    last: int = STEPS,
    samples: dict[int, list[str]] | None = None,
    evaluated: tuple[int, ...] = (),
    saved: tuple[int, ...] = (),
    **other: Any,
) -> list[str]:
    """What a rank writes that makes these steps; `other` is what each step is said to have."""
    told = []
    for step in range(first, last + 1):
        variables = {"best": ["value", f"{step}", f"{step}"]}
        generators = {"numpy": f"n{step}", "random": "r"}
        began = {"variables": variables, "globals": generators, "iterators": [], "files": []}
        done = {
            "samples": (samples or {}).get(step, [f"s{step}"]),
            "losses": [1.0 / step],
            "rates": {"optimizer": [0.1]},
            "gradients": {"optimizer": f"g{step}"},
            "weights": {"optimizer": f"w{step}"},
            "torch_generator": f"t{step}",
            "batches": 1,
            "evaluation": [f"e{step}"] if step in evaluated else [],
        }
        told += [{"began": step, **began}, {"ended": step, **done, **other}]
        told += [{"saved": step}] if step in saved else []
    return [json.dumps(line) for line in told]


def record(**options: Any) -> RankRecord:
    return parse(lines(**options))
