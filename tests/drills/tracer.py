"""Sees the system calls of running ranks, and can act between one and the next.

A thread of the test traces every thread of the given processes by ptrace(2), as strace does. At
the entry of a call the process stands still, the call not yet made: what is done to it then is
done "before this system call", which no outside observer could arrange.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from patience import scaled

_SYSCALLS = {
    **{0: "read", 1: "write", 3: "close", 5: "fstat", 8: "lseek", 9: "mmap", 10: "mprotect"},
    **{11: "munmap", 12: "brk", 16: "ioctl", 17: "pread64", 18: "pwrite64", 20: "writev"},
    **{24: "sched_yield", 28: "madvise", 46: "sendmsg", 47: "recvmsg", 72: "fcntl"},
    **{39: "getpid", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 79: "getcwd", 82: "rename"},
    **{83: "mkdir", 84: "rmdir", 87: "unlink", 88: "symlink", 89: "readlink", 96: "gettimeofday"},
    **{141: "setpriority", 186: "gettid", 202: "futex", 217: "getdents64", 221: "fadvise64"},
    **{230: "clock_nanosleep", 232: "epoll_wait", 233: "epoll_ctl", 251: "ioprio_set"},
    **{257: "openat", 262: "newfstatat", 263: "unlinkat", 266: "symlinkat", 267: "readlinkat"},
    **{277: "sync_file_range", 285: "fallocate", 316: "renameat2", 318: "getrandom", 332: "statx"},
    **{44: "sendto", 45: "recvfrom", 7: "poll", 14: "rt_sigprocmask", 273: "set_robust_list"},
    **{334: "rseq", 435: "clone3", 60: "exit", 264: "renameat", 258: "mkdirat", 4: "stat"},
}
"""The x86_64 numbers of what a save does; any other call goes by its number."""

_AT_FDCWD = -100
_PATH = {"mkdir", "rmdir", "unlink", "readlink", "stat", "rename"}
_DIRFD_PATH = {"openat", "newfstatat", "unlinkat", "readlinkat", "mkdirat", "renameat", "renameat2"}
_DIRFD_PATH |= {"statx"}
_DESCRIPTOR = {"read", "write", "close", "fstat", "lseek", "ioctl", "pread64", "pwrite64"}
_DESCRIPTOR |= {"fcntl", "fsync", "fdatasync", "ftruncate", "getdents64", "fadvise64"}
_DESCRIPTOR |= {"sync_file_range", "fallocate"}
_WRITES = {"write", "pwrite64"}
_ENTRIES = {"mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "symlink", "symlinkat"}
_ENTRIES |= {"rename", "renameat", "renameat2"}

_SEIZE, _INTERRUPT, _SYSCALL, _GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
_TRACE_SYSGOOD, _TRACE_CLONE, _EXIT_KILL = 1, 8, 1 << 20
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_ENTRY, _EXIT = 1, 2


class _SyscallInfo(ctypes.Structure):
    """`struct ptrace_syscall_info`, ptrace(2); after an exit the first argument is the result."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("_pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Call:
    """One system call: who makes it, on what.

    `path` is absolute where the call names a file or a descriptor of one; `target` is the second
    path of a rename, or the text of a symlink; `content` is what was written to a file. `result` is
    0 or more, or minus the error.
    """

    pid: int
    tid: int
    name: str
    arguments: tuple[int, ...]
    path: str = ""
    target: str = ""
    content: bytes = field(default=b"", repr=False)
    result: int = 0

    @property
    def opens_for_writing(self) -> bool:
        """Whether this call opens a file such that its content could change."""
        flags = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
        return self.name == "openat" and bool(self.arguments[2] & flags)

    @property
    def creates(self) -> bool:
        """Whether this call may create the file that it opens."""
        return self.name == "openat" and bool(self.arguments[2] & os.O_CREAT)

    @property
    def changes_folder(self) -> bool:
        """Whether this call may make, remove or rename an entry of a folder."""
        return self.name in _ENTRIES or self.creates


def supported() -> bool:
    """Whether this machine's system calls are those of the table."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


class Tracer:
    """Traces processes until they end; `entered` and `left` are told of every call, in order.

    Of the calls that change a folder one is made after the other, by whichever thread: else the
    kernel might make two, and the second be reported as the first.
    """

    def __init__(
        self,
        pids: Iterable[int],
        entered: Callable[[Call], None] = lambda call: None,
        left: Callable[[Call], None] = lambda call: None,
    ) -> None:
        """Returns once every thread of the processes is traced."""
        self._entered, self._left = entered, left
        self._inside: dict[int, Call] = {}
        self._changing: int | None = None
        self._waiting: deque[int] = deque()
        self._process: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._attached = threading.Event()
        self._thread = threading.Thread(target=self._trace, args=(list(pids),), daemon=True)
        self._thread.start()
        self._attached.wait()

    def join(self, deadline: float = 60.0) -> None:
        """Wait until all processes have ended; raise what the tracing failed with, if it did."""
        self._thread.join(scaled(deadline))
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive(), f"still traced after {scaled(deadline):.0f} s"

    def _trace(self, pids: list[int]) -> None:
        try:
            for pid in pids:
                self._seize(pid)
            self._attached.set()
            self._follow()
        except BaseException as error:  # noqa: BLE001 - raised again by join
            self._failure = error
        finally:
            self._attached.set()

    def _seize(self, pid: int) -> None:
        """Trace every thread; threads made meanwhile are reported by those that made them."""
        tasks = Path(f"/proc/{pid}/task")
        options = _TRACE_SYSGOOD | _TRACE_CLONE | _EXIT_KILL
        while new := {int(task.name) for task in tasks.iterdir()} - self._process.keys():
            for tid in new:
                self._process[tid] = pid
                if _ptrace(_SEIZE, tid, options, unless=(errno.EPERM, errno.ESRCH)):
                    _ptrace(_INTERRUPT, tid, 0, unless=(errno.ESRCH,))

    def _follow(self) -> None:
        while True:
            try:
                tid, status = os.waitpid(-1, _WALL | _WNOTHREAD)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                self._inside.pop(tid, None)
                self._let_next_change(tid)
                continue
            number, forwarded = os.WSTOPSIG(status), 0
            if number == signal.SIGTRAP | 0x80:
                self._report(tid)
                if not self._may_proceed(tid):
                    continue
            elif status >> 16 == 0:
                forwarded = number
            _ptrace(_SYSCALL, tid, forwarded, unless=(errno.ESRCH,))

    def _may_proceed(self, tid: int) -> bool:
        """Whether a thread goes on now, at the entry of a call or after it."""
        call = self._inside.get(tid)
        if call is None or not call.changes_folder:
            self._let_next_change(tid)
            return True
        if self._changing is not None:
            self._waiting.append(tid)
            return False
        self._changing = tid
        return True

    def _let_next_change(self, tid: int) -> None:
        """This thread is in no call that changes a folder, or has ended: it is another's turn."""
        if tid in self._waiting:
            self._waiting.remove(tid)
        if tid != self._changing:
            return
        self._changing = self._waiting.popleft() if self._waiting else None
        if self._changing is not None:
            _ptrace(_SYSCALL, self._changing, 0, unless=(errno.ESRCH,))

    def _report(self, tid: int) -> None:
        info = _SyscallInfo()
        size, place = ctypes.sizeof(info), ctypes.addressof(info)
        if _libc.ptrace(_GET_SYSCALL_INFO, tid, size, place) <= 0:
            return  # killed meanwhile
        with suppress(FileNotFoundError, ProcessLookupError):  # the same
            if info.op == _ENTRY:
                call = self._decode(tid, info)
                self._inside[tid] = call
                self._entered(call)
            elif info.op == _EXIT and (made := self._inside.pop(tid, None)):
                result = ctypes.c_int64(info.number).value
                self._left(replace(made, result=result))

    def _decode(self, tid: int, info: _SyscallInfo) -> Call:
        name = _SYSCALLS.get(info.number, f"syscall-{info.number}")
        arguments = tuple(ctypes.c_int64(value).value for value in info.arguments)
        pid = self._process.setdefault(tid, _process_of(tid))
        call = Call(pid, tid, name, arguments)
        first = ctypes.c_int32(arguments[0]).value
        if name in _PATH:
            call = replace(call, path=_path(tid, _AT_FDCWD, arguments[0]))
        elif name in _DIRFD_PATH:
            call = replace(call, path=_path(tid, first, arguments[1]))
        elif name in _DESCRIPTOR:
            call = replace(call, path=_descriptor(tid, first))
        if name in ("rename", "renameat", "renameat2"):
            at, place = (_AT_FDCWD, 1) if name == "rename" else (arguments[2], 3)
            call = replace(call, target=_path(tid, ctypes.c_int32(at).value, arguments[place]))
        elif name in ("symlink", "symlinkat"):
            at, place = (_AT_FDCWD, 1) if name == "symlink" else (arguments[1], 2)
            path = _path(tid, ctypes.c_int32(at).value, arguments[place])
            call = replace(call, path=path, target=_text(tid, arguments[0]))
        elif name in _WRITES and _is_file(tid, first):
            call = replace(call, content=_memory(tid, arguments[1], arguments[2]))
        return call


def _ptrace(request: int, tid: int, data: int, unless: tuple[int, ...]) -> bool:
    """False if the call failed in one of the ways in `unless`."""
    if _libc.ptrace(request, tid, None, data) == 0:
        return True
    code = ctypes.get_errno()
    if code not in unless:
        raise OSError(code, os.strerror(code), f"ptrace request {request:#x}")
    return False


def _process_of(tid: int) -> int:
    status = Path(f"/proc/{tid}/status").read_text()
    return int(status.partition("Tgid:")[2].split()[0])


def _is_file(tid: int, descriptor: int) -> bool:
    return stat.S_ISREG(Path(f"/proc/{tid}/fd/{descriptor}").stat().st_mode)


def _descriptor(tid: int, number: int) -> str:
    try:
        return str(Path(f"/proc/{tid}/fd/{number}").readlink())
    except FileNotFoundError:
        return ""


def _path(tid: int, directory: int, address: int) -> str:
    text = _text(tid, address)
    link = f"/proc/{tid}/cwd" if directory == _AT_FDCWD else f"/proc/{tid}/fd/{directory}"
    return os.path.normpath(Path(link).readlink() / text)


def _text(tid: int, address: int) -> str:
    """The zero-terminated string there; pages are read one by one, the next may not exist."""
    found = b""
    while address and b"\0" not in found:
        length = 4096 - address % 4096
        found += _memory(tid, address, length)
        address += length
    return os.fsdecode(found.partition(b"\0")[0])


def _memory(tid: int, address: int, length: int) -> bytes:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), length, address)
