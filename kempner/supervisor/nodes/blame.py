"""Decides which nodes are not to be used again after a failure: pure, and only by a positive sign.

A question that could not be put says nothing about a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kempner.supervisor.nodes.health_check import NO_ANSWER

_GONE = frozenset(
    ("DOWN", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN")
)
_BOOTING = frozenset(("POWERING_UP", "POWER_UP", "REBOOT_ISSUED", "REBOOT", "BOOT"))
_SIGNS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN"}


def node_flags(state: str) -> frozenset[str]:
    """The words of a node's State in `scontrol show node`: `IDLE*+CLOUD+POWERING_UP`."""
    words = (word for word in state.upper().split("+") if word)
    found: set[str] = set()
    for word in words:
        found.add(word.rstrip("".join(_SIGNS)))
        found.update(meaning for sign, meaning in _SIGNS.items() if sign in word)
    return frozenset(found)


def still_boots(flags: Collection[str]) -> bool:
    """Whether Slurm says that a node is on its way up, as those of a cloud are for minutes."""
    return not _BOOTING.isdisjoint(flags)


def lost_nodes(
    accused: Collection[str],
    answers: Mapping[str, Sequence[int]],
    slurm: Mapping[str, Collection[str]],
    own: str,
) -> dict[str, str]:
    """Those of the `accused` nodes that cannot be used again, each with the sign against it.

    `answers` has the nodes that answered when all were asked at once, each with the processes of
    earlier ranks that still run there; `slurm` the flags of silent ones, as far as Slurm said
    anything. A silent node is gone if Slurm says so, or if others answered the same question. The
    supervisor's `own` node answers by running it.
    """
    found = {}
    for node in sorted(accused):
        if left := answers.get(node, ()):
            one = len(left) == 1
            listed = ", ".join(map(str, left))
            found[node] = f"process{'' if one else 'es'} {listed} of an earlier attempt still run"
            found[node] += "s" if one else ""
        elif node not in answers and node != own and _is_gone(slurm.get(node, ()), answers):
            found[node] = NO_ANSWER
    return found


def _is_gone(flags: Collection[str], answers: Collection[str]) -> bool:
    if still_boots(flags):
        return False
    return bool(answers) or not _GONE.isdisjoint(flags)
