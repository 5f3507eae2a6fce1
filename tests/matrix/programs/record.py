"""What a program of the matrix notes of each step, and the trouble that comes in one of them.

A line of `notes-<rank>.jsonl` is a fact: what it is, where, and its value. A number that was
computed is noted to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

TROUBLE = "KEMPNER_MATRIX_TROUBLE"
"""The variable that says what comes where, as `stop@7`, `kill@7.1`, `stop@evaluation 6`; and in
which rank."""

MUTANT = "KEMPNER_MATRIX_MUTANT"
"""The variable that names the mistake that is planted into kempner here, if one is."""

if mutant := os.environ.get(MUTANT):
    from mutants import MUTANTS

    MUTANTS[mutant]()

_micro: dict[int, int] = {}
"""How many micro batches of a step are noted."""


def step(number: int, loss: Tensor | float, samples: Iterable[int], rates: Iterable[float]) -> None:
    """A micro batch of a step: its samples, the loss, and the learning rate of each group.

    To be called when the loss is known, and before the weights change: here trouble comes.
    """
    micro = _micro[number] = _micro.get(number, -1) + 1
    place = f"{number}.{micro}"
    fact("samples", place, list(map(int, samples)))
    fact("rates", place, [float(rate).hex() for rate in rates])
    fact("loss", place, _bits(loss))
    strike(place)
    if micro == 0:
        strike(str(number))


def drawn(number: int, name: str, value: float) -> None:
    """A random number that the program has drawn in a step."""
    fact(name, str(number), float(value).hex())


def evaluating(number: int) -> None:
    """An evaluation after a step has begun; to be called within it: here trouble may come."""
    strike(f"evaluation {number}")


def evaluation(number: int, value: Tensor | float) -> None:
    """The result of the evaluation after a step."""
    fact("evaluation", str(number), _bits(value))


def end(steps: int, model: nn.Module, **facts: object) -> None:
    """The program has come to its end: after how many steps, with which weights, and what else it
    has found, such as the best step."""
    weights = dict(model.state_dict())
    fact("steps", "end", steps)
    fact("weights", "end", digest(weights))
    fact("size", "end", sum(float(w.abs().sum()) for w in _floats(weights)).hex())
    for name, value in facts.items():
        fact(name, "end", value)


def digest(weights: Mapping[str, Any]) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(_whole(value).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _floats(weights: Mapping[str, Any]) -> list[Tensor]:
    tensors = [_whole(value) for value in weights.values() if isinstance(value, Tensor)]
    return [value.double() for value in tensors if value.is_floating_point()]


def _whole(value: Tensor) -> Tensor:
    """All of a tensor that may be sharded; a number as a list of one."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu().reshape(-1)


def _bits(value: Tensor | float) -> str:
    return float(value.detach() if isinstance(value, Tensor) else value).hex()


def fact(name: str, place: str, value: object) -> None:
    """Note a fact."""
    with open(f"notes-{RANK}.jsonl", "a") as notes:
        notes.write(json.dumps({"fact": name, "place": place, "value": value}) + "\n")


def strike(place: str) -> None:
    """Let trouble come if it is to come here."""
    kind, _, where = os.environ.get(TROUBLE, "").partition("@")
    if where == place:
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)
