"""What kempner's ledger says of a run, and no log would."""

from __future__ import annotations

from kempner.insight.triage.rules import Cause

NOTHING = Cause("none", "nothing failed", "nothing")
"""A run that goes on, has made its last step, or has not begun."""

HANG = Cause(
    "hang",
    "no rank made progress any more",
    "look at the stacks of the rank that the others waited for (rank-N.stacks), and at its node",
)

BAD_DATA = Cause(
    "bad_data",
    "data or a checkpoint was read, and is damaged or does not fit",
    "repair or replace what the sentence names",
)

DISAPPEARED = Cause(
    "rank_disappeared",
    "a rank was gone without a message: its node or the network to it",
    "ask `sinfo -R` and the operators about the node; kempner leaves it out if evidence is found",
)

UNEXPLAINED = Cause(
    "unknown",
    "nothing in the run's directory says why",
    "look at the last lines of the ranks' logs, and at the job's output",
)

STOPPED = Cause(
    "stopped",
    "the ranks were asked to stop",
    "start it again to go on",
)

CAUSES = (NOTHING, HANG, BAD_DATA, DISAPPEARED, STOPPED)
