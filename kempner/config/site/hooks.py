"""Configuration of hooks: commands of the site's own that kempner runs when something happens."""

from __future__ import annotations

from kempner.config.section import PositiveFloat, Section, Text


class HooksSection(Section):
    """Commands for /bin/sh that are run when something happens; the facts are in variables such as
    KEMPNER_EVENT, KEMPNER_REASON and KEMPNER_NODE. One that fails never ends the run."""

    before_start: Text | None = None
    """Run on every node before each start of the ranks, such as a node check of the site. A node on
    which it fails is suspect."""
    node_suspect: Text | None = None
    """Run after a node has become suspect."""
    give_up: Text | None = None
    """Run after kempner gave up on the run."""
    not_requeued: Text | None = None
    """Run after a Slurm job was not put back into the queue, though the run could go on."""
    completed: Text | None = None
    """Run after the last step."""
    timeout: PositiveFloat = 60.0
    """Seconds after which a hook is killed, and has failed."""
