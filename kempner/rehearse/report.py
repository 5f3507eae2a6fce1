"""The report of a rehearsal: one table, and what to do.

Lines of a program that make two of its runs differ by themselves.

Sentences about what did not come back, with what to do.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.rehearse.compare import Changed, differences
from kempner.rehearse.judge import (
    RehearsalFindings,
    RehearsalVerdict,
    Row,
    identifiers,
    judge,
    read_again,
    shown,
    sources_by_name,
)
from kempner.rehearse.rehearsal import RehearsalRecord
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode

_CLOCKS = {"time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today"}
_OWN_ENTROPY = {"urandom", "uuid4", "uuid1", "token_bytes", "token_hex", "randbits", "getpid"}
_SEEDED = {"default_rng", "RandomState", "Random", "SeedSequence"}
_FILES = {"listdir", "scandir", "glob", "rglob", "iterdir", "iglob"}


@dataclass(frozen=True)
class Hint:
    """A line, and what it does."""

    place: str
    what: str
    kind: str

    @property
    def words(self) -> str:
        """The finding in words."""
        return f"{self.place} {self.what}"


def find_hints(sources: Mapping[str, str]) -> list[Hint]:
    """What is found in sources by the names of their files."""
    return [hint for name, text in sources.items() for hint in _hints(name, text)]


def _hints(name: str, text: str) -> Iterator[Hint]:
    tree = ast.parse(text)
    sorted_calls = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "sorted"
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, place = _called(node), f"{name}:{node.lineno}"
        if called in _CLOCKS and not node.args:
            yield Hint(place, "reads the clock (time)", "clock")
        elif called in _OWN_ENTROPY:
            yield Hint(place, f"takes what differs in each process ({called})", "seed")
        elif called in _SEEDED and not node.args and not node.keywords:
            yield Hint(place, f"draws without a seed ({called})", "seed")
        elif called in _FILES and id(node) not in sorted_calls:
            yield Hint(place, f"takes files in the order of their folder ({called})", "files")
        elif called == "hash":
            yield Hint(place, "calls hash(), which differs in each process", "hash")


def _called(node: ast.Call) -> str:
    func = node.func
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


MOST = 6
"""Sentences about variables."""

_FIELDS = {
    "samples": "the samples differ",
    "generators": "torch's generator stands elsewhere",
    "losses": "the loss differs",
    "gradients": "the gradients differ",
    "rate": "the learning rate differs",
    "weights": "the weights differ",
    "evaluation": "the evaluation is not made as undisturbed",
}


def explain(seen: RehearsalRecord, findings: RehearsalFindings) -> list[str]:
    """All that there is to say, the likeliest cause first."""
    sentences = list(findings.sentences)
    if findings.verdict is RehearsalVerdict.FAILED:
        return sentences
    if findings.verdict is RehearsalVerdict.BY_ITSELF:
        sentences += _by_itself(seen, findings)
    elif findings.verdict is RehearsalVerdict.DIFFERS:
        sentences += _first_difference(findings)
        sentences += about_changes(findings.changes)
        if not findings.changes and findings.first:
            sentences += _without_a_variable(seen, findings)
    return sentences


def _first_difference(findings: RehearsalFindings) -> list[str]:
    if not findings.first:
        names = ", ".join(sorted({c.name for c in findings.changes})[:3])
        if not findings.changes:
            return []
        return [f"no step differs yet, but training depends on what did not come back: {names}"]
    one = findings.first[0]
    return [f"{_FIELDS[one.field]} from step {one.step} (rank {one.rank})"]


def about_changes(changes: Sequence[Changed]) -> list[str]:
    """A sentence for each variable, or for what belongs to one."""
    groups: dict[tuple[str, str], list[Changed]] = defaultdict(list)
    for change in changes:
        whole = change.kind in ("weight", "buffer", "names")
        groups[_root(change.name) if whole else change.name, change.kind].append(change)
    order = ["names", "weight", "buffer", "optimizer", "scheduler", "generator", "object"]
    rank = lambda key: order.index(key[1]) if key[1] in order else len(order)  # noqa: E731
    keys = sorted(groups, key=rank)
    told = [_about(name, kind, groups[name, kind]) for name, kind in keys[:MOST]]
    more = len(keys) - MOST
    return [*told, f"and {more} more variables"] if more > 0 else told


def _about(name: str, kind: str, changes: Sequence[Changed]) -> str:
    anew = all(change.anew for change in changes)
    one, root = changes[0], _root(name)
    register = f'register it: state={{"{identifiers(name)[-1]}": {name}}}'
    began = "is as in the first start again" if anew else "did not come back"
    match kind:
        case "weight" | "buffer":
            what = "weights" if kind == "weight" else "buffers (statistics)"
            rest = f" ({_short(changes)})"
            if anew:
                return (
                    f"`{root}`: its {what}{rest} are those of the first start again: {register}, "
                    "or load nothing into it after survive(...)"
                )
            return (
                f"`{root}`: its {what}{rest} are not those that were there: something changes them "
                f"after they came back, or they are not registered: {register}"
            )
        case "names":
            return (
                f"`{root}` has other weights or buffers by name: one appears late: create it in "
                "__init__, before survive(...)"
            )
        case "optimizer":
            return f"`{name}` ({one.before.words}): the optimizer's state {began}: {register}"
        case "scheduler":
            return f"`{name}` ({one.before.words}): the scheduler {began}: {register}"
        case "generator":
            return f"`{name}` (a generator, {one.before.words}) {began}: {register}"
        case "groups":
            return f"`{name}`: the learning rate is {one.now.words} instead of {one.before.words}"
        case "object":
            return f"`{name}` ({one.before.words}) {began}: {register}"
        case "set":
            return f"`{name}` is a set, which has another order in each process: sort it"
    return (
        f"`{name}` is {one.now.words} instead of {one.before.words}: compute it from the step, or "
        f"keep it in a dict, list or tensor and {register}"
    )


def _without_a_variable(seen: RehearsalRecord, findings: RehearsalFindings) -> list[str]:
    """What differs although all variables that can be looked at came back."""
    one = findings.first[0]
    if one.field == "samples":
        began = seen.undisturbed.records[0].began
        iterators = ", ".join(f"`{name}`" for name in began[max(began)].iterators)
        which = f" ({iterators})" if iterators else ""
        return [
            f"a loader or an iterator{which} begins anew at each start: give the loader to "
            "survive(..., data=loader), or choose the samples by the step"
        ]
    if one.field == "gradients":
        return [
            "the gradients of a step depend on those before it: they are accumulated over steps, "
            "and no checkpoint holds them: survive(..., accumulate=N) makes it one step"
        ]
    if one.field == "evaluation":
        return [f"the evaluation after step {one.step} was lost, or its result differs"]
    return ["its cause is none of the program's variables: look at what the step calls"]


def _by_itself(seen: RehearsalRecord, findings: RehearsalFindings) -> list[str]:
    """Two undisturbed runs differ."""
    one = findings.first[0] if findings.first else None
    told = [
        "two undisturbed runs differ"
        + (f": {_FIELDS[one.field]} from step {one.step}" if one is not None else "")
        + ": no resume can be exact"
    ]
    told += [
        f"it reads {shown(path)}, which an earlier start has written" for path in read_again(seen)
    ]
    sets = [change for change in findings.changes if change.kind == "set"]
    hints = find_hints(sources_by_name(seen))
    if seen.again is not None and not differences(seen.undisturbed.records, seen.again.records):
        told.append(
            "the order of a set, or hash(), differs in each process (PYTHONHASHSEED): sort "
            + (", ".join(f"`{change.name}`" for change in sets) or "what is iterated over")
        )
        return told
    told += [hint.words for hint in hints]
    others = [change for change in findings.changes if change.kind != "set"]
    return told + [
        f"`{change.name}` is {change.now.words} instead of {change.before.words}"
        for change in others[:MOST]
        if change.kind in ("value", "container", "tensor", "generator")
    ]


def _root(name: str) -> str:
    return name.split(".")[0].split("[")[0]


def _short(changes: Sequence[Changed]) -> str:
    first, more = changes[0].name.partition(".")[2], len(changes) - 1
    return f"{first} and {more} more" if more else first


COLUMNS = ("samples", "losses", "rate", "evaluation", "weights", "names", "generators", "variables")
MOST_FILES = 12


def report(seen: RehearsalRecord, size: int) -> tuple[str, ExitCode]:
    """All lines, and the exit code that goes with them."""
    findings = judge(seen)
    lines = [*_table(findings.rows), ""]
    lines += [f"- {sentence}" for sentence in explain(seen, findings)]
    lines += _outside(seen)
    if findings.told_only:
        names = ", ".join(f"`{name}`" for name in sorted(set(findings.told_only))[:MOST_FILES])
        lines.append(f"begins anew, and only tells people something: {names}")
    lines.append(_verdict(seen, findings, size))
    code = ExitCode.COMPLETED if findings.verdict is RehearsalVerdict.EXACT else ExitCode.CRASHED
    return "\n".join(lines).strip("\n"), code


def _verdict(seen: RehearsalRecord, findings: RehearsalFindings, size: int) -> str:
    ranks = count(size, "rank")
    over = f"{seen.undisturbed.last} steps on {ranks}"
    match findings.verdict:
        case RehearsalVerdict.EXACT:
            return f"exact: {over}, stopped and killed {len(seen.disturbances)} times"
        case RehearsalVerdict.DIFFERS:
            return f"not exact, over {over}"
        case RehearsalVerdict.BY_ITSELF:
            return f"not repeatable, over {over}"
        case RehearsalVerdict.FAILED:
            return "not rehearsed to the end"


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    width = max(len(row.words) for row in rows)
    head = " ".join([" " * width, *COLUMNS])
    lines = [head.rstrip()]
    for row in rows:
        cells = [_cell(row, name).ljust(len(name)) for name in COLUMNS]
        lines.append(" ".join([row.words.ljust(width), *cells]).rstrip())
    return lines


def _cell(row: Row, name: str) -> str:
    same = row.fields.get(name)
    return "-" if same is None else "exact" if same else "DIFFER"


def _outside(seen: RehearsalRecord) -> list[str]:
    """What the program did elsewhere."""
    starts = [seen.undisturbed, *seen.starts]
    records = [record for start in starts for record in start.records]
    wrote = sorted({path for r in records for path in r.wrote if Path(path).exists()})
    called = sorted({host for record in records for host in record.called})
    lines = []
    if wrote:
        names = ", ".join(shown(path) for path in wrote[:MOST_FILES])
        more = f" and {len(wrote) - MOST_FILES} more" if len(wrote) > MOST_FILES else ""
        lines.append(f"written outside of the run: {names}{more}")
    if called:
        lines.append(f"connected to: {', '.join(called[:MOST_FILES])}")
    return lines
