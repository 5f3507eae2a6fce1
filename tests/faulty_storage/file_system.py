"""The file system's process: `file_system.py FOLDER MOUNT SOCKET LOG SECONDS`.

It mirrors FOLDER at MOUNT, takes rules at the Unix socket SOCKET (a request a connection: see
`Control`), and writes each fault that it injects to LOG, as a line of JSON. It ends, and unmounts,
when its standard input does. What it has told of names and files the kernel believes for SECONDS,
as a client of a network file system does: what others change meanwhile is seen late.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mfusepy

from faulty_storage.rules import DELAY, EMPTY, HANG, MARK, Life, Rule, Strike, strikes

THREADS = 400
"""More than operations that hang at the same time."""

Entry = tuple[str, dict[str, int], int]

_STAT = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")
_TIMES = ("atime", "mtime", "ctime")


class Faults:
    """The rules, and the log of what they did."""

    def __init__(self, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._changed = threading.Condition()
        self._lives: dict[str, Life] = {}
        self.trace = False
        """Whether operations that no rule meets are logged, too."""

    def add(self, rule: Rule) -> None:
        with self._changed:
            self._lives[rule.name] = Life(rule)

    def clear(self, name: str | None) -> None:
        """End a rule, or all of them; what hangs goes on."""
        with self._changed:
            for gone in [name] if name is not None else list(self._lives):
                self._lives.pop(gone, None)
            self._changed.notify_all()

    def state(self) -> dict[str, str]:
        """How far each rule is: waiting (for `after`), armed, on, over."""
        with self._changed:
            return {name: _stage(life) for name, life in self._lives.items()}

    def meet(self, operation: str, *paths: str) -> Strike | None:
        """Wait, where the operation hangs; raise, where it fails at once.

        What is returned is left to the operation: to be cut, or to show nothing.
        """
        with self._changed:
            strike = self._strike(operation, paths)
            if strike is not None and strike.fault in (HANG, DELAY):
                self._hold(strike)
                return None
        if strike is None:
            return None
        if strike.fault == EMPTY:
            if operation == "readdir":
                return strike
            raise OSError(errno.ENOENT, "absent")
        if not strike.cut:
            raise OSError(getattr(errno, strike.fault), strike.fault)
        return strike

    def _strike(self, operation: str, paths: Sequence[str]) -> Strike | None:
        """What happens to an operation on these paths; logged, unless it is a delay."""
        if self.trace:
            self._note(operation, paths[0], "", "")
        now, found = time.monotonic(), None
        for path in paths:
            for strike in strikes(self._lives.values(), operation, path, now):
                real = found is None or found.fault == DELAY
                if strike.fault == MARK or (real and strike.fault != DELAY):
                    self._note(operation, path, strike.fault, strike.rule, cut=strike.cut)
                if strike.fault != MARK and (found is None or found.fault == DELAY):
                    found = strike
        return found

    def _hold(self, strike: Strike) -> None:
        """Wait until this is over, or its rule is gone."""
        while strike.rule in self._lives:
            left = None if strike.until is None else strike.until - time.monotonic()
            if left is not None and left <= 0:
                return
            self._changed.wait(left)

    def _note(self, operation: str, path: str, fault: str, rule: str, cut: bool = False) -> None:
        line = {"time": time.time(), "op": operation, "path": path, "fault": fault, "rule": rule}
        line |= {"cut": True} if cut else {}
        os.write(self._log, (json.dumps(line) + "\n").encode())


def _stage(life: Life) -> str:
    if life.to_see:
        return "waiting"
    if life.began is None:
        return "armed"
    return "over" if life.over(time.monotonic()) else "on"


def _kind(entry: os.DirEntry[str]) -> dict[str, int]:
    # An entry without a number is one that readdir(3) leaves out.
    folder = entry.is_dir(follow_symlinks=False)
    mode = stat.S_IFDIR if folder else stat.S_IFLNK if entry.is_symlink() else stat.S_IFREG
    return {"st_ino": entry.inode(), "st_mode": mode}


def _lose_answer(strike: Strike | None) -> None:
    if strike is not None:
        raise OSError(getattr(errno, strike.fault), strike.fault)


class Mirror(mfusepy.Operations):
    """Each operation is carried out on the folder, once the faults have let it pass."""

    use_ns = True

    def __init__(
        self, folder: Path, faults: Faults, ready: Callable[[], None], believed: float = 0.0
    ) -> None:
        self._folder, self._faults, self._ready = folder, faults, ready
        self._believed = believed

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        conn_info.max_write = 2**20
        if config_3 is not None:
            for name in ("entry_timeout", "attr_timeout", "negative_timeout", "ac_attr_timeout"):
                setattr(config_3, name, self._believed)
            config_3.direct_io = 0 if self._believed else 1
            config_3.use_ino = 1
        self._ready()

    def _real(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def _do(self, operation: str, path: str, call: Callable[[], Any], *more: str) -> Any:
        """Carry out an operation that a fault cuts by losing its answer."""
        strike = self._faults.meet(operation, *(p.lstrip("/") for p in (path, *more)))
        result = call()
        _lose_answer(strike)
        return result

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        seen = self._do("stat", path, lambda: os.lstat(self._real(path)))
        return {name: getattr(seen, name) for name in _STAT} | {
            f"st_{name}": getattr(seen, f"st_{name}_ns") for name in _TIMES
        }

    def access(self, path: str, amode: int) -> int:
        def check() -> None:
            if not os.access(self._real(path), amode, follow_symlinks=False):
                raise OSError(errno.EACCES if os.path.lexists(self._real(path)) else errno.ENOENT)

        self._do("stat", path, check)
        return 0

    def readdir(self, path: str, fh: int) -> Iterable[Entry]:
        strike = self._faults.meet("readdir", path.lstrip("/"))
        if strike is not None and strike.fault == EMPTY:
            return []
        with os.scandir(self._real(path)) as found:
            entries = [(entry.name, _kind(entry), 0) for entry in found]
        _lose_answer(strike)
        return entries

    def readlink(self, path: str) -> str:
        return str(self._do("readlink", path, lambda: self._real(path).readlink()))

    def open(self, path: str, flags: int) -> int:
        return self._opened("open", path, flags & ~os.O_CREAT, 0)

    def create(self, path: str, mode: int, fi: int = os.O_RDWR) -> int:
        return self._opened("create", path, fi | os.O_CREAT, mode)

    def _opened(self, operation: str, path: str, flags: int, mode: int) -> int:
        # The kernel sends the offset of each append, and a lone descriptor reads and writes.
        flags &= ~(os.O_APPEND | os.O_DIRECT)
        strike = self._faults.meet(operation, path.lstrip("/"))
        descriptor = os.open(self._real(path), flags | os.O_CLOEXEC, mode)
        if strike is not None:
            os.close(descriptor)
        _lose_answer(strike)
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        strike = self._faults.meet("read", path.lstrip("/"))
        if strike is None:
            return os.pread(fh, size, offset)
        if size < 2:
            _lose_answer(strike)
        return os.pread(fh, size // 2, offset)  # the rest meets the fault with the next read

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        strike = self._faults.meet("write", path.lstrip("/"))
        done = os.pwrite(fh, data[: len(data) // 2] if strike else data, offset)
        _lose_answer(strike)
        return done

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._do("fsync", path, lambda: os.fsync(fh))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        def sync() -> None:
            descriptor = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

        self._do("fsync", path, sync)
        return 0

    def flush(self, path: str, fh: int) -> int:
        # Only what was written can still fail when it is closed.
        if fcntl.fcntl(fh, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            self._do("flush", path, lambda: None)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only mode 0")
        self._do("write", path, lambda: os.posix_fallocate(fh, offset, size))
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._do("truncate", path, lambda: os.truncate(self._real(path), length))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._do("mkdir", path, lambda: self._real(path).mkdir(mode))
        return 0

    def rmdir(self, path: str) -> int:
        self._do("unlink", path, lambda: self._real(path).rmdir())
        return 0

    def unlink(self, path: str) -> int:
        self._do("unlink", path, lambda: self._real(path).unlink())
        return 0

    def rename(self, old: str, new: str) -> int:
        self._do("rename", old, lambda: self._real(old).rename(self._real(new)), new)
        return 0

    def symlink(self, target: str, source: str) -> int:
        self._do("symlink", target, lambda: self._real(target).symlink_to(source))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._real(path).chmod(mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times, follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        seen = self._do("statfs", path, lambda: os.statvfs(self._real(path)))
        return {name: getattr(seen, name) for name in dir(seen) if name.startswith("f_")}


class Control(threading.Thread):
    """Answers requests: `add` with a rule, `clear` with a name or null, `state`, `trace`."""

    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(name="control", daemon=True)
        self._faults = faults
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def run(self) -> None:
        while True:
            connection = self._listener.accept()[0]
            with connection, connection.makefile("rw") as stream:
                (name, value), answer = json.loads(stream.readline()), None
                if name == "add":
                    self._faults.add(Rule.from_json(value))
                elif name == "clear":
                    self._faults.clear(value)
                elif name == "trace":
                    self._faults.trace = value
                elif name == "state":
                    answer = self._faults.state()
                stream.write(json.dumps(answer) + "\n")


def main(folder: str, mount: str, control: str, log: str, believed: str) -> None:
    faults = Faults(Path(log))
    Control(Path(control), faults).start()
    threading.Thread(target=_follow_parent, args=(mount, faults), daemon=True).start()
    mfusepy.FUSE(
        Mirror(Path(folder), faults, lambda: print("ready", flush=True), float(believed)),
        mount,
        foreground=True,
        fsname="kempner-faulty-storage",
        max_threads=THREADS,
        max_idle_threads=20,
    )


def _follow_parent(mount: str, faults: Faults) -> None:
    sys.stdin.buffer.read()
    faults.clear(None)
    subprocess.run(["fusermount3", "-u", "-z", mount], check=False)
    os._exit(0)  # an open file would keep even an unmounted file system from ending


if __name__ == "__main__":
    main(*sys.argv[1:])
