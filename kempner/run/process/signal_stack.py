"""Room for the signals that come at once.

`faulthandler` has the main thread handle signals on a stack of their own (CPython 3.11). Signals
that come together are handled one inside the other, and there is not room for many: five at once
have overwritten the memory below that stack.
"""

from __future__ import annotations

import ctypes
import mmap
import os

SIZE = 1 << 20
"""Bytes: 16 KiB for each of 64 signals."""


class _Stack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = (
        ("ss_sp", ctypes.c_void_p),
        ("ss_flags", ctypes.c_int),
        ("ss_size", ctypes.c_size_t),
    )


_room = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_room))  # signals come until the process has ended


def make_room_for_signals() -> None:
    """Give this thread a stack on which all signals fit. Raises `OSError` if the kernel refuses."""
    stack = _Stack(ctypes.addressof(ctypes.c_char.from_buffer(_room)), 0, SIZE)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sigaltstack: {os.strerror(error)}")
