"""Configuration of hooks: commands of the site's own that kempner runs when something happens."""

from __future__ import annotations

from typing import Annotated

from kempner.config.section import Key, PositiveFloat, Section, Text


class HooksSection(Section):
    """Commands for /bin/sh that are run when something happens; the facts are in variables such as
    KEMPNER_EVENT, KEMPNER_REASON and KEMPNER_NODE. One that fails never ends the run."""

    before_start: Annotated[Text | None, Key(example="/opt/site/bin/node-check --quick")] = None
    """Run on every node before each start of the ranks, such as a node check of the site. A node on
    which it fails is suspect."""
    node_suspect: Annotated[
        Text | None, Key(example="echo $KEMPNER_NODE: $KEMPNER_REASON >> suspects.txt")
    ] = None
    """Run after a node has become suspect."""
    give_up: Annotated[
        Text | None, Key(example="echo $KEMPNER_REASON | mail -s kempner me@example.org")
    ] = None
    """Run after kempner gave up on the run."""
    not_requeued: Annotated[
        Text | None, Key(example="sbatch scripts/slurm/multinode.sh train.toml")
    ] = None
    """Run after a Slurm job was not put back into the queue, though the run could go on."""
    completed: Annotated[Text | None, Key(example="sbatch evaluate.sh")] = None
    """Run after the last step."""
    timeout: Annotated[PositiveFloat, Key("seconds", 120.0)] = 60.0
    """Seconds after which a hook is killed, and has failed."""
