"""Named points at which a test or a rehearsal can make something go wrong.

The code of a save says `fail_point("write", step)` where a fault is worth having. That is one look
into a dict, unless a handler was set for that name in this process; the handler runs in the thread
that passes the point, and may kill the process, block, or raise. The names, and what can be asked
to happen there, are in `kempner.config.resilience`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Handler: TypeAlias = Callable[[int | None], None]
"""Called with the step that the point was passed for, None where there is none."""

_handlers: dict[str, Handler] = {}


def fail_point(name: str, step: int | None = None) -> None:
    """Do what was asked for at this point; raises whatever the handler raises."""
    handler = _handlers.get(name)
    if handler is not None:
        handler(step)


def set_fail_point(name: str, handler: Handler | None) -> None:
    """Call `handler` whenever this process passes the point of that name; None for nothing."""
    if handler is None:
        _handlers.pop(name, None)
    else:
        _handlers[name] = handler
