"""How long the supervisor waits for its agents."""

from __future__ import annotations

COME_WITHIN = 30.0
"""Seconds within which an agent connects: it starts in one, or where its container is open."""

ANSWER_WITHIN = 3.0
"""Seconds that agents get to say that they are there, before Slurm is asked about their nodes."""

CLEARED_WITHIN = 15.0
"""Seconds within which an agent has ended what is left of an attempt."""

SURVEYS = 2
"""Times that nodes are asked: agents may have died unnoticed, or with a step that Slurm aborted."""

DEAF_AFTER = 4.0
"""Seconds without the end of ranks that were to be killed after which their agent is killed."""

GIVEN_UP_WITHIN = 10.0
"""Seconds to wait until an agent that was killed, and all that Slurm kills with it, is gone."""

HUNG_UP = 3.0
"""Seconds after the end of an agent's process, seen by its link, in which srun may say how."""

AWAY = 45.0
"""Seconds after which an agent whose link broke off in any other way is not expected back."""

END_WITHIN, LOST_WITHIN = 10.0, 1.0
"""Seconds for srun to end when agents were sent away, and if it waits for a node that is gone."""
