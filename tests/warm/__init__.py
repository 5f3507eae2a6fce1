"""Starts what the tests run without the seconds of processor time that its imports take.

Most of what a test of whole runs would cost are imports: a supervisor and its fork server take five
seconds of processor time for them, and a rank under torchrun four. So each worker of pytest has a
*template*, which has imported all that, and becomes the tests' processes by forking: the product's
own fork server is one. Nothing of a test ever runs in the template itself.

A process that was forked is as one that was started by a command, but for what Python reads before
its first line: a test that is about that, or about who is whose parent, is marked as `cold`, with
the reason, and starts every process by its real command. A share is cold for its own sake:
tests/unit/house/test_cold_share.py. KEMPNER_TESTS_COLD=1 has all tests so.
"""

from __future__ import annotations

from warm.slots import dear, workers
from warm.template import ALL_COLD, Process, choose, complete, start

__all__ = ["ALL_COLD", "Process", "choose", "complete", "dear", "start", "workers"]
