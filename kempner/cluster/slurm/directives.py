"""Parses the `#SBATCH` lines of a batch script as sbatch does, up to the first command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm.resources import count_gpus

_SHORT = {
    **{"A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task"},
    **{"d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "i": "input"},
    **{"J": "job-name", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes"},
    **{"n": "ntasks", "o": "output", "p": "partition", "q": "qos", "S": "core-spec", "t": "time"},
    **{"w": "nodelist", "x": "exclude", "B": "extra-node-info"},
}
"""Options of one letter that have a value."""

_FLAGS = frozenset(
    (
        *("requeue", "no-requeue", "hold", "contiguous", "overcommit", "oversubscribe", "no-kill"),
        *("exclusive", "spread-job", "wait", "quiet", "verbose", "parsable", "test-only", "reboot"),
        *("use-min-nodes", "get-user-env", "ignore-pbs", "kill-on-invalid-dep", "stepmgr"),
    )
)
"""Long options without a value, or with one that only `=` gives."""

_LONG = frozenset(
    (
        *_SHORT.values(),
        *_FLAGS,
        *("signal", "open-mode", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "gres"),
        *("ntasks-per-core", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres-flags"),
        *("mem", "mem-per-cpu", "mem-per-gpu", "mem-bind", "time-min", "export", "export-file"),
        *("mail-type", "mail-user", "comment", "reservation", "wckey", "profile", "nice", "hint"),
        *("cpus-per-gpu", "gpu-bind", "gpu-freq", "cpu-freq", "tmp", "mincpus", "deadline", "uid"),
        *("cores-per-socket", "sockets-per-node", "threads-per-core", "thread-spec", "priority"),
        *("cluster-constraint", "container", "delay-boot", "propagate", "switches", "wrap", "gid"),
        *("acctg-freq", "batch", "bb", "bbf", "power", "prefer", "reboot", "tres-per-task"),
    )
)
"""All long options; other words may be abbreviations of them."""


@dataclass(frozen=True)
class Option:
    """An sbatch option in line `line`, from byte `start` to `end` of the script; `value` may be
    empty."""

    name: str
    value: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class Directives:
    """The options of a script; `end` is the byte after the last `#SBATCH` line that sbatch
    reads."""

    options: tuple[Option, ...]
    end: int
    late: int = 0
    """The first `#SBATCH` line after the first command, which sbatch ignores; 0 if there is
    none."""

    def last(self, name: str) -> Option | None:
        """The last option of this name, which is the one that counts."""
        found = [option for option in self.options if option.name == name]
        return found[-1] if found else None

    def value(self, *names: str) -> str:
        """The value of the first of these options that is given; else empty."""
        return next((o.value for name in names if (o := self.last(name)) is not None), "")

    def number(self, *names: str) -> int | None:
        """As `value`, as a number; None if not given, or a range."""
        value = self.value(*names)
        return int(value) if value.isdecimal() else None

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs per node; 0 if none are requested, None if that cannot be computed."""
        nodes = self.number("nodes") or 1
        try:
            if given := self.value("gpus-per-node"):
                return count_gpus(given)
            if given := self.value("gpus"):
                count = count_gpus(given)
                return None if count % nodes else count // nodes
            if given := self.value("gpus-per-task"):
                tasks = self.number("ntasks-per-node") or (self.number("ntasks") or 1) // nodes
                return count_gpus(given) * tasks
            given = self.value("gres")
            return count_gpus(given) if re.search(r"\bgpu\b", given) else 0
        except ValueError:
            return None


def read(text: bytes) -> Directives:
    """The directives of a script. Raises `ValueError` with a sentence if a line cannot be split
    into words."""
    options = [option for line in _head(text) for option in _options(line)]
    end, late = 0, 0
    for line in _lines(text):
        if line.is_directive and not line.over:
            end = line.offset + len(line.content)
        late = late or (line.number if line.is_directive and line.over else 0)
    first = text.find(b"\n") + 1 or len(text)
    return Directives(tuple(options), end or first, late)


def regroup(words: Sequence[str]) -> list[str]:
    """The options of a command line that lost its quotes, given its words between single spaces: a
    word that is no option belongs to the value of the option before it. Raises `ValueError` with a
    sentence for a word that is neither."""
    groups: list[list[str]] = []
    for word in words:
        long = re.fullmatch(r"--([a-z][a-z-]*)(=.*)?", word, re.DOTALL)
        short = re.match(r"-[A-Za-z]", word)
        if short or (long and (_unabbreviated(long[1]) in _LONG or _ALSO.fullmatch(long[1]))):
            groups.append([word])
        elif word.startswith("-") or not groups:
            raise ValueError(f"`{word}` is no option of sbatch: it was between quotes")
        elif len(groups[-1]) == 1 and _named(groups[-1][0])[2]:
            groups[-1].append(word)
        else:
            groups[-1][-1] += f" {word}"
    return [word for group in groups for word in group]


_ALSO = re.compile(
    "extra|admin-comment|segment|consolidate-segments|spread-segments|resv-ports|oom-kill-step"
    "|network|mcs-label|tres-bind|share|cluster|container-.+|help-env|autocomplete|prolog|epilog"
)
"""Rarer long options, and those of the pyxis plugin."""


def read_pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names and values of sbatch options given as `--name=value` or `--name value`."""
    left = list(words)
    while left:
        name, value, takes = _named(left.pop(0))
        yield name, left.pop(0) if takes and left else value


def read_words(text: str) -> list[str]:
    """The words of all `#SBATCH` lines, as on sbatch's command line."""
    return [word for line in _head(text.encode()) for word, _, _ in _words(line)]


@dataclass(frozen=True)
class _Line:
    """A line at byte `offset`; `over`: a command came before it."""

    number: int
    offset: int
    content: bytes
    over: bool

    @property
    def is_directive(self) -> bool:
        return self.content.startswith(b"#SBATCH")


def _lines(text: bytes) -> Iterator[_Line]:
    offset, over = 0, False
    for number, content in enumerate(text.splitlines(keepends=True), start=1):
        yield _Line(number, offset, content, over)
        over = over or not (content.startswith(b"#") or not content.strip())
        offset += len(content)


def _head(text: bytes) -> Iterator[_Line]:
    return (line for line in _lines(text) if line.is_directive and not line.over)


def _options(line: _Line) -> Iterator[Option]:
    words = list(_words(line))
    while words:
        word, start, end = words.pop(0)
        name, value, takes = _named(word)
        if takes and words:
            value, _, end = words.pop(0)
        yield Option(name, value, line.number, start, end)


def _named(word: str) -> tuple[str, str, bool]:
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = _unabbreviated(name[2:])
        return name, value, not equals and name not in _FLAGS
    if name.startswith("-") and name[1:2] in _SHORT:
        return _SHORT[word[1]], word[2:], len(word) == 2
    return name.lstrip("-"), value, False


def _unabbreviated(name: str) -> str:
    """The full name of a long option, which may be abbreviated as far as it is unique."""
    if name in _LONG:
        return name
    meant = [long for long in _LONG if long.startswith(name)]
    return meant[0] if len(meant) == 1 else name


def _words(line: _Line) -> Iterator[tuple[str, int, int]]:
    """The words after `#SBATCH`, up to a comment, each with its first byte and the one after its
    last."""
    text, at = line.content.decode(errors="surrogateescape"), len("#SBATCH")
    for found in re.finditer(r"""(?:"[^"\n]*"|'[^'\n]*'|\\.|[^\s"'\\])+""", text[at:]):
        if found[0].startswith("#"):
            return
        start, end = (len(text[: at + i].encode(errors="surrogateescape")) for i in found.span())
        try:
            yield "".join(shlex.split(found[0])), line.offset + start, line.offset + end
        except ValueError as error:
            raise ValueError(f"line {line.number} cannot be read: {error}") from error
