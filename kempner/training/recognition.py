"""Whether a program that starts is the one that its run belongs to; rank 0 looks, all hear of it.

standing = recognise(run, ranks, facts, accepted)  # refused, or told what differs
...                                                # the newest checkpoint is loaded
standing.keep(run, step)                           # this start is what the next is compared to
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.record.identity import (
    Difference,
    RunIdentity,
    Verdict,
    compare,
    describe_refusal,
    plain,
    read_identity,
    write_identity,
)
from kempner.run.record.program import command_of_process
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import versions
from kempner.training.groups.process_groups import Ranks

_ANOTHER_RUN = "give it another run_dir"


@dataclass(frozen=True)
class Standing:
    """What a run was at its start before (None: it is new, or older than this is kept), what it is
    now, and the differences; the same on all ranks.
    """

    before: RunIdentity | None
    now: RunIdentity
    differences: tuple[Difference, ...] = field(default=())

    @property
    def recorded_facts(self) -> Mapping[str, object]:
        """The facts as the start before told them; empty for a run that has none."""
        return self.before.facts if self.before is not None else {}

    def refuse_if_complete(self, run: RunDirectory, step: int) -> None:
        """Raise `UsageError` if `step` is the last one, of a run that was another one's.

        Differences that the user accepts change how a run goes on; one that is complete does not.
        """
        accepted = [each for each in self.differences if each.verdict is Verdict.ACCEPTED]
        steps = self.now.facts.get("steps")
        if accepted and isinstance(steps, int) and step >= steps:
            changes = "; ".join(each.sentence for each in accepted)
            raise UsageError(
                f"the run in {run.path} is complete at step {step}, and is not this program's "
                f"result: {changes}; ask for more steps, or {_ANOTHER_RUN}"
            )

    def keep(self, run: RunDirectory) -> None:
        """Have the next start be compared with this one; by rank 0."""
        now = self.now if self.before is None else self.now.after(self.before)
        if now == self.before:
            return
        try:
            storage_waits().retry(partial(write_identity, run, now), path=run.identity)
        except OSError as error:  # the next start is compared with an older one
            logger().warning("cannot keep what the run is", error=str(error))


def recognise(
    run: RunDirectory, ranks: Ranks, facts: Mapping[str, object], accepted: Collection[str]
) -> Standing:
    """Compare this program with the one whose run it is, and say what differs, in a line each.

    Raises `UsageError`, on all ranks alike, where the result would be another program's.
    """
    standing = Standing(None, RunIdentity())
    if ranks.world.rank == 0:
        now = _this_program(ranks, facts)
        before = storage_waits().retry(partial(read_identity, run), path=run.identity)
        found = compare(before, now, accepted) if before is not None else []
        standing = Standing(before, now, tuple(found))
    told = ranks.broadcast(standing)
    assert isinstance(told, Standing)  # rank 0 made one
    if refusal := describe_refusal(told.differences, run.path, _ANOTHER_RUN):
        raise UsageError(refusal)
    if ranks.world.rank == 0:
        for each in told.differences:
            say(f"{'accepted: ' if each.verdict is Verdict.ACCEPTED else ''}{each.sentence}")
    return told


def _this_program(ranks: Ranks, facts: Mapping[str, object]) -> RunIdentity:
    return RunIdentity(
        command=command_of_process(sys.argv, sys.modules["__main__"], str(Path.cwd())),
        facts={name: plain(value) for name, value in facts.items()},
        world=ranks.world.size,
        host=platform.node(),
        versions=versions(),
    )
