"""Which rank am I, of how many: read from the launcher that really started this process.

A login shell's stale `RANK=0 WORLD_SIZE=99` must not make a lone process wait for phantom peers:
torch's variables count only if torchrun or a kempner supervisor set them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """A rank's place.

    `launcher` says who placed it; `warning` is a sentence for the log, empty if all is well.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    warning: str = ""

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.local_size == self.size


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def discover(environ: Mapping[str, str]) -> World:
    """Read this process's place from its environment.

    Raises `ValueError` with a sentence if a launcher's variables are incomplete or contradictory.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _placed(environ, "torchrun")
    if "KEMPNER_ATTEMPT" in environ:
        return _placed(environ, "kempner")
    stale = [f"{name}={environ[name]}" for name in _NAMES if name in environ]
    warning = (
        f"{' '.join(stale)} in the environment is ignored: neither torchrun nor kempner set it"
        if stale
        else ""
    )
    return World(rank=0, size=1, local_rank=0, local_size=1, launcher="none", warning=warning)


def _placed(environ: Mapping[str, str], launcher: str) -> World:
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in _NAMES)
    except KeyError as missing:
        raise ValueError(f"{launcher} started this rank without {missing.args[0]}") from missing
    except ValueError as error:
        raise ValueError(f"{launcher} set a rank variable to no number: {error}") from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ValueError(
            f"{launcher} set RANK={rank} of {size} and LOCAL_RANK={local_rank} of {local_size}, "
            "which cannot be"
        )
    return World(rank, size, local_rank, local_size, launcher)
