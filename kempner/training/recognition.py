"""Whether a program that starts is the one that its run belongs to: rank 0 checks, all ranks learn
the result.

standing = recognise(folder, ranks, this_program(ranks, facts), ...)  # refused or told
standing.refuse_if_complete(step)  # when the newest checkpoint is loaded
standing.keep(run)  # the next start is compared with this one
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from torch.optim import Optimizer

from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import storage_waits
from kempner.run.record.identity import (
    Consequence,
    Difference,
    RunIdentity,
    compare,
    describe_refusal,
    plain,
    read_identity,
    write_identity,
)
from kempner.run.record.lease import Holder
from kempner.run.record.program import files_of_process, identity_of_process, keep_copies
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import versions
from kempner.training.groups.process_groups import Ranks

_ANOTHER_RUN = "give it another run_dir"


@dataclass(frozen=True)
class RunComparison:
    """What the run in `folder` was at its start before (None: it is new, or older than this is
    kept), what it is now, and the differences; the same on all ranks.
    """

    folder: RunDirectory
    before: RunIdentity | None
    now: RunIdentity
    differences: tuple[Difference, ...] = field(default=())

    @property
    def recorded_facts(self) -> Mapping[str, object]:
        """The facts as the start before told them; empty for a run that has none."""
        return self.before.facts if self.before is not None else {}

    def refuse_if_complete(self, step: int) -> None:
        """Raise `DataError` if `step` is the last one, of a run that was another one's.

        Differences that the user accepts change how a run goes on; one that is complete does not.
        """
        accepted = [each for each in self.differences if each.verdict is Consequence.ACCEPTED]
        steps = self.now.facts.get("steps")
        if accepted and isinstance(steps, int) and step >= steps:
            changes = "; ".join(each.sentence for each in accepted)
            raise DataError(
                f"the run in {self.folder.path} is complete at step {step}, and is not this "
                f"program's result: {changes}; ask for more steps, or {_ANOTHER_RUN}"
            )

    def keep(self, run: RunDirectory) -> None:
        """Have the next start be compared with this one, and the run keep copies of the program; by
        rank 0."""
        keep_copies(run, files_of_process(sys.argv, sys.modules, Path.cwd()))
        now = self.now if self.before is None else self.now.after(self.before)
        write = partial(write_identity, self.folder, now)
        try:
            storage_waits().retry(write, path=self.folder.identity)
        except OSError as error:  # the next start is compared with an older one
            logger().warning("cannot keep what the run is", error=str(error))


def recognise(
    folder: RunDirectory,
    ranks: Ranks,
    program: RunIdentity,
    accepted: Collection[str],
    launched_as_before: bool,
) -> RunComparison:
    """Compare this program with the one whose run it is, and say what differs, in a line each.

    `launched_as_before` says that a supervisor has looked at its command. Raises `DataError`, on
    all ranks alike, where the result would be another program's.
    """
    standing = RunComparison(folder, None, program)
    if ranks.world.rank == 0:
        before = storage_waits().retry(partial(read_identity, folder), path=folder.identity)
        if before is not None and launched_as_before:
            program = replace(program, launched=before.launched)
            standing = RunComparison(folder, None, program)
        # Without a checkpoint it begins anew, whatever was tried before.
        if before is not None and any(folder.checkpoints.glob("step-*")):
            found = compare(before, program, accepted)
            standing = RunComparison(folder, before, program, tuple(found))
    told = ranks.broadcast(standing)
    assert isinstance(told, RunComparison)  # rank 0 made one
    if refusal := describe_refusal(told.differences, folder.path, _ANOTHER_RUN):
        raise DataError(refusal)
    for each in told.differences:
        accepted_first = "accepted: " if each.verdict is Consequence.ACCEPTED else ""
        ranks.say(f"{accepted_first}{each.sentence}")
    return told


_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""What of an optimizer's groups is no setting, or says how it computes, and not what."""


def describe_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """What an optimizer is, for the facts of a run: its class, and the settings of its groups in
    whatever order."""
    groups = [
        {name: value for name, value in group.items() if name not in _HOW and _is_setting(value)}
        | {"parameters": sum(parameter.numel() for parameter in group["params"])}
        for group in optimizer.param_groups
    ]
    ordered = sorted(groups, key=lambda group: json.dumps(group, sort_keys=True))
    return {"class": type(optimizer).__name__, "groups": ordered}


def _is_setting(value: object) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, int | float | str | None) for part in parts)


def this_program(ranks: Ranks, facts: Mapping[str, object]) -> RunIdentity:
    """What this process runs, with the `facts` of its loop; on rank 0 with its files."""
    told = {name: plain(value) for name, value in facts.items()}
    if ranks.world.rank != 0:
        return RunIdentity(facts=told)
    return replace(
        identity_of_process(sys.argv, sys.modules, os.environ, Path.cwd()),
        facts=told,
        surroundings={"ranks": ranks.world.size, "host": platform.node(), **versions()},
        claimed_by=asdict(Holder.here(0.0)),
    )
