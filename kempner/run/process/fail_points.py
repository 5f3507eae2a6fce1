"""Named points at which a test or a rehearsal can make something go wrong.

The code of a save calls `fail_point("write", step)` where a fault is of interest. That costs one
dict lookup, unless a handler was set for that name in this process; the handler runs in the calling
thread, and may kill the process, block, or raise. The names, and the faults possible at each, are
in `kempner.config.resilience`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Handler: TypeAlias = Callable[[int | None], None]
"""Called with the step, or None where there is none."""

_handlers: dict[str, Handler] = {}


def fail_point(name: str, step: int | None = None) -> None:
    """Run the handler of this point, if one is set; raises what it raises."""
    handler = _handlers.get(name)
    if handler is not None:
        handler(step)


def set_fail_point(name: str, handler: Handler | None) -> None:
    """Call `handler` whenever this process passes the point `name`; None removes it."""
    if handler is None:
        _handlers.pop(name, None)
    else:
        _handlers[name] = handler
