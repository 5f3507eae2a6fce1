"""Which nodes a job could run on, by what it asks for: pure functions of what scontrol shows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_TYPED_GPU = re.compile(r"gpu:([\w.+-]*[A-Za-z][\w.+-]*)(?:[:=(,]|$)")
_WORD = re.compile(r"[\w.:-]+")


@dataclass(frozen=True)
class Demand:
    """What a job asks of each node.

    `features` is its constraint in Slurm's words, `resources` its TresPerNode; both may be empty.
    """

    features: str = ""
    resources: str = ""


def eligible(demand: Demand, nodes: Iterable[Mapping[str, str]]) -> set[str] | None:
    """The names of those nodes that have what is demanded, in whatever state they are.

    `nodes` are the fields of `scontrol show node -o`. None if the constraint is too involved to be
    judged here.
    """
    found = set()
    for node in nodes:
        has = _split(node.get("AvailableFeatures", ""), node.get("ActiveFeatures", ""))
        fits = satisfies(demand.features, has)
        if fits is None:
            return None
        if fits and gpu_types(demand.resources) <= gpu_types(node.get("Gres", "")):
            found.add(node["NodeName"])
    return found


def satisfies(constraint: str, features: Collection[str]) -> bool | None:
    """Whether a node with these features satisfies a constraint of `&` and `|`, or an empty one.

    None for what speaks of several nodes together: brackets, counts, parentheses.
    """
    if not constraint:
        return True
    parts = [[word.strip() for word in part.split("&")] for part in constraint.split("|")]
    if not all(_WORD.fullmatch(word) for part in parts for word in part):
        return None
    return any(all(word in features for word in part) for part in parts)


def gpu_types(resources: str) -> set[str]:
    """The types of GPU named in a Gres or TresPerNode: `gres:gpu:h100:4` names `h100`."""
    return set(_TYPED_GPU.findall(resources.replace("/", ":")))


def _split(*lists: str) -> set[str]:
    return {word for text in lists for word in text.split(",") if word and word != "(null)"}
