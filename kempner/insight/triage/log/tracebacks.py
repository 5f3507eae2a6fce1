"""Finds Python tracebacks in lines, also where those of several ranks are mixed, and errors after
which a program goes on: it retries, skips, or falls back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from kempner.insight.triage.log.lines import LogLine

_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*?[A-Za-z]\w*)(?:: ?(?P<message>.*))?$")
_BARE = re.compile(
    r"(?P<kind>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Timeout))(?::\s?(?P<message>.*))?$"
)
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3|<frozen |<string>|/torch/|/bin/")
_MUTED = re.compile(
    r"Exception ignored in|--- Logging error ---|exception was never retrieved|Error in atexit\."
)
_OF_PEER = re.compile(
    r"(?:\w+\.)*(?:EOFError$|BrokenPipeError\b|Connection\w*Error\b|TimeoutError\b|\w*Timeout\b)"
    r"|(?i:.*\b(?:timed out|time-?out|heartbeat|peers?|barrier|not respond\w*|broken (?:pipe|pool)"
    r"|broken process pool|connection|has been shut ?down|communicator|other ranks?)\b)"
    r"|(?i:.*\b(?:ranks?|workers?|process(?:es)?|actors?|child\w*)\b.{0,30}"
    r"\b(?:died|dead|lost|gone|failed|exited|crashed|terminated|unreachable)\b)"
)
"""Exceptions of a process whose peer at the other end of a pipe or socket is gone."""

_HEADER = "Traceback (most recent call last)"
_OF_RANK = re.compile(r"\(RANK (\d+)\)|^-- Process (\d+) terminated with the following error")
"""How a rank, or the parent process, repeats the exception of another."""

_CARRIED = re.compile(r"Caught \w+ in (?:\w+ )*(?:DataLoader worker|replica|pin memory|thread)\b")
"""torch's exception in place of a worker's, whose traceback comes below."""

_OF_RAY = re.compile(r"RayTaskError\(.*\(pid=(?P<pid>\d+), ip=(?P<node>[\d.]+)")
"""The process whose exception Ray's driver shows below."""

_HANDLED = "During handling of the above exception"
_CAUSED = "The above exception was the direct cause"

_NEAR = 6  # innermost functions of a traceback whose names are kept
_STRAY = 60  # other lines inside a traceback after which it counts as incomplete


@dataclass(frozen=True)
class FoundException:
    """An exception: `Type: message` and the innermost line of the user's own code.

    `follows`: it was raised because of another. `muted`: the program handled it. `doubtful`: it may
    have. `own`: the program's own code raised it, not a library. `through` are the innermost
    functions of the traceback.
    """

    line: LogLine
    text: str
    frame: str = ""
    follows: bool = False
    muted: bool = False
    doubtful: bool = False
    own: bool = False
    through: str = ""


@dataclass
class _OpenTraceback:
    muted: bool = False
    doubtful: bool = False
    follows: bool = False
    rank: int | None = None
    own: str = ""
    last: str = ""
    through: tuple[str, ...] = ()
    stray: int = 0


@dataclass
class Tracebacks:
    """Follows the open traceback of each writer, line by line."""

    _open: dict[object, _OpenTraceback] = field(default_factory=dict)
    _muted: set[object] = field(default_factory=set)
    _linked: set[object] = field(default_factory=set)
    _announced_at: dict[object, int] = field(default_factory=dict)
    _repeated: dict[object, int] = field(default_factory=dict)
    _of_ray: dict[object, re.Match[str]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def is_open(self, line: LogLine) -> bool:
        return line.writer in self._open

    def doubt(self, line: LogLine, order: int) -> None:
        """A traceback of the same writer right below this line may have been handled."""
        self._announced_at[line.writer] = order

    def feed(self, line: LogLine, order: int) -> FoundException | None:
        """The exception that ends with this line, if any; `order` is the line's number over all
        files."""
        writer, text = line.writer, line.text
        if "RayTaskError" in text and (ray := _OF_RAY.search(text)) is not None:
            self._of_ray[writer] = ray
        if (of := _OF_RANK.search(text)) is not None:
            self._repeated[writer] = int(of[1] or of[2])
        if _HEADER in text:
            muted, follows = writer in self._muted, writer in self._linked
            doubtful = self._announced_at.pop(writer, -1) == order - 1
            rank = self._repeated.pop(writer, line.rank)
            self._open[writer] = _OpenTraceback(muted, doubtful, follows, rank)
            self._muted.discard(writer)
            self._linked.discard(writer)
            return None
        if (begun := self._open.get(writer)) is not None:
            return self._go_on(begun, line)
        if _MUTED.search(text):
            self._muted.add(writer)
        elif text.startswith(_CAUSED):
            self._linked.add(writer)
        elif (found := _BARE.match(text)) and not line.warning:
            return FoundException(line, _words(found))
        return None

    def _go_on(self, begun: _OpenTraceback, line: LogLine) -> FoundException | None:
        text = line.text
        if (frame := _FRAME.match(text)) is not None:
            begun.last = f"{frame['file']}:{frame['line']}"
            if frame["function"]:
                begun.last += f" in {frame['function']}"
                begun.through = (*begun.through, frame["function"])[-_NEAR:]
            if not _LIBRARY.search(frame["file"]):
                begun.own = begun.last
            return None
        if text[:1] in (" ", "\t", ""):
            return None
        found = _RAISED.match(text)
        if found is None or " " in found["kind"] or not _plausible(found):
            begun.stray += 1
            if begun.stray > _STRAY:
                del self._open[line.writer]
            return None
        del self._open[line.writer]
        attributed_line = replace(line, rank=begun.rank)
        if (ray := self._of_ray.pop(line.writer, None)) is not None:
            attributed_line = replace(attributed_line, pid=int(ray["pid"]), node=ray["node"])
        words = _words(found)
        follows = begun.follows or _CARRIED.search(words) is not None
        return FoundException(
            attributed_line,
            words,
            begun.own or begun.last,
            follows,
            begun.muted,
            begun.doubtful,
            own=bool(begun.own) and begun.own == begun.last,
            through=" ".join(begun.through),
        )


def _plausible(found: re.Match[str]) -> bool:
    """Whether this is the last line of a traceback rather than another line."""
    kind = found["kind"].rpartition(".")[2]
    if found["message"] is None:
        return bool(re.search(r"(?:Error|Exception|Interrupt|Exit|Warning|Timeout)$", kind))
    return kind[:1].isupper() and not kind.isupper()


def _words(found: re.Match[str]) -> str:
    message = found["message"]
    return f"{found['kind']}: {message}" if message else found["kind"]


def is_handled(line: LogLine) -> bool:
    return line.text.startswith(_HANDLED)


def is_of_peer(raised: str) -> bool:
    """Whether an exception only reports that another process is gone."""
    return _OF_PEER.match(raised) is not None


_GOES_ON = re.compile(
    r"(?i)\b(?:re-?trying|re-?try(?: in| after|:|\()|re-?tries left|trying (?:again|to resume)"
    r"|will (?:be )?(?:re-?try|re-?tried|try again|skip|skipped|continue|reconnect)"
    r"|retry loop|back(?:ing)?[- ]?off|sleeping|skip(?:s|ping|ped)|ignor(?:es|ing|ed)"
    r"|fall(?:s|ing)?[- ]?back|continuing|carrying on|proceeding|anyway|accepting|tolerat\w+"
    r"|recovered|re(?:connect|open)(?:ing|ed)|non-?fatal|harmless|substitut(?:ed|ing)"
    r"|disabling|(?:is|metrics|logging) disabled)\b"
)
_COUNTED = re.compile(
    r"(?i)\b(?:attempt|try|retry|trial)\W{0,3}(?P<this>\d+)\s*(?:/|of|out of)\s*(?P<most>\d+)"
)
_GIVES_UP = re.compile(
    r"(?i)\b(?:giv(?:e|es|ing) up|gave up|no (?:more |further )?(?:retr|attempt|fallback)"
    r"|(?<!max )retries (?:exhausted|exceeded)|exhausted|(?:last|final) (?:attempt|retry|try)"
    r"|(?:not|cannot|can't|could not|unable to|never) (?:be )?"
    r"(?:re-?tr[yi]|recover|continu|skip|ignor|fall)\w*"
    r"|abort(?:ing|ed)?|exit(?:s|ed|ing)?|terminat(?:e|es|ing)|unrecoverable|stopping|shutting down"
    r"|after \d+ (?:attempts|retries|tries)|too many)\b|(?<!non-)(?<!non)\bfatal\b"
)
_AGAIN = re.compile(
    r"(?i)re-?tr(?:y|ies)|attempt|try|skip|ignor|fall\w*[- ]?back|continu|recover|reconnect"
)
_FAILED = re.compile(r"(?i)fail|error|exception|could not|cannot|can't|unable|caught")


def is_tolerated(text: str) -> bool:
    """Whether the line says that the program goes on."""
    if _GIVES_UP.search(text) is not None:
        return False
    counted = _COUNTED.search(text)
    if counted is not None:
        return int(counted["this"]) < int(counted["most"])
    return _GOES_ON.search(text) is not None


def takes_back(text: str) -> bool:
    """Whether an exception right above this line was handled."""
    return _AGAIN.search(text) is not None and is_tolerated(text)


def announces(text: str) -> bool:
    """Whether a traceback right below this line, by a logger, may have been handled. It may also be
    that of the last attempt."""
    return _FAILED.search(text) is not None and is_tolerated(text)
