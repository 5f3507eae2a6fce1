"""Judges a rehearsal, and reports it: a table, what was not restored, and what to do."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kempner.rehearse.compare import (
    Changed,
    StepDifference,
    changed,
    differences,
    lost_evaluations,
    names_that_matter,
    samples_elsewhere,
)
from kempner.rehearse.rehearsal import ObservedStart, RehearsalRecord
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode

ALWAYS = {"weight", "buffer", "names", "optimizer", "scheduler", "generator", "object"}
"""Kinds of variables that must be restored, whatever the program does with them."""

IF_USED = {"value", "container", "tensor"}
"""Kinds that must be restored if training depends on them."""


class RehearsalVerdict(Enum):
    EXACT = "exact"
    DIFFERS = "not exact"
    BY_ITSELF = "not repeatable"
    FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """A row of the table: a start, compared with the undisturbed run."""

    words: str
    fields: Mapping[str, bool | None]
    """Whether each was restored; None if there was nothing to compare."""


@dataclass
class RehearsalFindings:
    """The findings of a rehearsal."""

    verdict: RehearsalVerdict
    rows: list[Row] = field(default_factory=list)
    first: list[StepDifference] = field(default_factory=list)
    """The first differences of the first start that has any."""
    changes: list[Changed] = field(default_factory=list)
    """Variables that were not restored in that start."""
    at: int = 0
    """Its first step."""
    sentences: list[str] = field(default_factory=list)
    output_only: list[str] = field(default_factory=list)
    """Variables that were not restored, but are only output."""


def judge(seen: RehearsalRecord) -> RehearsalFindings:
    if seen.undisturbed.failed:
        return _failure("the program itself", seen.undisturbed)
    if seen.starts[-1].failed:
        return _failed_later(seen)
    used = names_that_matter(sources_of(seen).values())
    findings = RehearsalFindings(RehearsalVerdict.EXACT)
    findings.rows = [_row(seen, number, used) for number in range(len(seen.starts))]
    _find_first(seen, findings, used)
    _look_elsewhere(seen, findings)
    _compare_files(seen, findings)
    return findings


def _failed_later(seen: RehearsalRecord) -> RehearsalFindings:
    """The findings before a failed start, and how that ended."""
    number, failed = len(seen.starts), seen.starts[-1]
    who = f"start {number}"
    if number > 1:
        who += f", of a program that was {seen.disturbances[number - 2].words},"
    failure = _failure(who, failed)
    if number == 1:
        return failure
    findings = judge(replace(seen, starts=seen.starts[:-1]))
    if findings.verdict is RehearsalVerdict.EXACT:
        findings.verdict = RehearsalVerdict.FAILED
    findings.sentences = failure.sentences + findings.sentences
    return findings


def _find_first(seen: RehearsalRecord, findings: RehearsalFindings, used: frozenset[str]) -> None:
    records = seen.undisturbed.records
    for number, start in enumerate(seen.starts):
        outcome = differences(records, start.records)
        changes = _changes(seen, number) if number or outcome else []
        kept = [c for c in changes if _must_come_back(c, used, bool(outcome))]
        findings.output_only += [c.name for c in changes if c not in kept and c.kind in IF_USED]
        wrong_place = _wrong_place(seen, number)
        if outcome or kept or wrong_place:
            findings.verdict = RehearsalVerdict.DIFFERS if number else RehearsalVerdict.BY_ITSELF
            findings.first, findings.changes, findings.at = outcome, kept, start.first
            findings.sentences += [wrong_place] if wrong_place else []
            return
    lost = lost_evaluations(records, [start.records for start in seen.starts])
    if lost:
        findings.verdict, findings.first = RehearsalVerdict.DIFFERS, lost


def _changes(seen: RehearsalRecord, number: int) -> list[Changed]:
    """The variables that differ as a start begins, on any rank, except those that differ in each
    process."""
    start, records = seen.starts[number], seen.undisturbed.records
    if start.first == 0:
        return []
    noise = set() if number == 0 else _noise(seen)
    found: dict[str, Changed] = {}
    for expected, other in zip(records, start.records, strict=True):
        step = start.first + (1 if number == 0 else 0)
        for change in changed(expected, other, step):
            if change.name not in noise:
                found.setdefault(change.name, change)
    return list(found.values())


def _noise(seen: RehearsalRecord) -> set[str]:
    """The variables that differ before any disturbance: times, process ids, folders."""
    found: set[str] = set()
    for expected, other in zip(seen.undisturbed.records, seen.starts[0].records, strict=True):
        for step in other.began:
            found |= {change.name for change in changed(expected, other, step)}
    return found


def _must_come_back(change: Changed, used: frozenset[str], differs: bool) -> bool:
    if change.kind in ALWAYS:
        return True
    if change.kind in IF_USED:
        return bool(used.intersection(identifiers(change.name)[-1:]))
    return differs


def identifiers(name: str) -> list[str]:
    """The identifiers in a path such as `task.norms[3]`."""
    words = name.replace("[", ".[").split(".")
    return [word for word in words if word.isidentifier()] or [name]


def _wrong_place(seen: RehearsalRecord, number: int) -> str:
    """A sentence if a start did not begin at the right step; empty if it did."""
    if number == 0:
        return ""
    before, start = seen.starts[number - 1], seen.starts[number]
    if start.first == 0:
        return ""
    least = before.last + 1
    if before.part.kills:
        stops = [s.last + 1 for s in seen.starts[:number] if not s.part.kills]
        if max(stops, default=1) <= start.first <= least + 1:
            return ""
    elif start.first == least:
        return ""
    words = seen.disturbances[number - 1].words
    return f"{words}, it began again with step {start.first} instead of {least}"


def _row(seen: RehearsalRecord, number: int, used: frozenset[str]) -> Row:
    records, start = seen.undisturbed.records, seen.starts[number]
    wrong = {one.field for one in differences(records, start.records)}
    compared = bool(seen.undisturbed.records[0].done.keys() & start.records[0].done.keys())
    fields: dict[str, bool | None] = {
        name: (name not in wrong) if compared else None
        for name in ("samples", "losses", "rate", "weights")
    }
    fields["generators"] = None if not compared else "generators" not in wrong
    fields["evaluation"] = _evaluation_of(seen, number)
    kept = [c for c in _changes(seen, number) if _must_come_back(c, used, bool(wrong))]
    fields["names"] = not any(c.kind == "names" for c in kept)
    fields["variables"] = not any(c.kind != "names" for c in kept)
    if any(c.kind == "generator" for c in kept):
        fields["generators"] = False
    if any(c.kind in ("weight", "buffer") for c in kept):
        fields["weights"] = False
    before = "" if number == 0 else f"{seen.disturbances[number - 1].words}, then "
    return Row(f"{before}steps {start.first} to {start.last}", fields)


def _evaluation_of(seen: RehearsalRecord, number: int) -> bool | None:
    """Whether the evaluations of this start's steps equal the undisturbed ones."""
    start, records = seen.starts[number], seen.undisturbed.records
    steps = {s for s, digests in records[0].evaluations.items() if digests}
    own = {s for s in steps if start.first <= s <= start.last}
    if not own:
        return None
    lost = lost_evaluations(records, [p.records for p in seen.starts])
    return not any(one.step in own for one in lost)


def _look_elsewhere(seen: RehearsalRecord, findings: RehearsalFindings) -> None:
    """Compare state, rates and samples on another number of ranks."""
    other, words = seen.elsewhere, f"another number of ranks ({len(seen.undisturbed.records)} -> "
    if other is None:
        return
    words = f"{words}{len(other.records)})"
    if other.failed:
        reason = last_words(other)
        findings.rows.append(Row(f"{words}: refused", {}))
        findings.sentences.append(f"on {words.removeprefix('on ')} it does not go on: {reason}")
        return
    records = seen.undisturbed.records[: len(other.records)]
    rate = all(
        done.rates == other.records[0].done[step].rates
        for step, done in records[0].done.items()
        if step in other.records[0].done
    )
    kinds = {"weight", "optimizer", "scheduler", "names"}
    state = [c for c in changed(records[0], other.records[0], other.first) if c.kind in kinds]
    samples = samples_elsewhere(seen.undisturbed.records, other.records, other.first - 1)
    fields = {"samples": samples, "rate": rate, "weights": not state}
    findings.rows.append(Row(f"{words}: steps {other.first} to {other.last}", fields))
    if findings.verdict is RehearsalVerdict.EXACT and (False in fields.values()):
        findings.verdict, findings.changes, findings.at = (
            RehearsalVerdict.DIFFERS,
            state,
            other.first,
        )
        wrong = " and ".join(name for name, same in fields.items() if same is False)
        findings.sentences.append(f"on {words}, {wrong} did not come back")


def _compare_files(seen: RehearsalRecord, findings: RehearsalFindings) -> None:
    undisturbed, disturbed = seen.contents
    if findings.verdict is RehearsalVerdict.BY_ITSELF:
        return
    for path in undisturbed.differing(disturbed):
        if findings.verdict is RehearsalVerdict.EXACT:
            findings.verdict = RehearsalVerdict.DIFFERS
        findings.sentences.append(f"{shown(path)} holds something else than undisturbed")


def _failure(who: str, played: ObservedStart) -> RehearsalFindings:
    codes = ", ".join(str(code) for code in sorted(set(played.codes)))
    sentence = f"{who} ended with code {codes}: {last_words(played)}"
    return RehearsalFindings(RehearsalVerdict.FAILED, sentences=[sentence])


def last_words(played: ObservedStart) -> str:
    """The last line that it has printed, preferably one of kempner or an error."""
    lines = [line for line in played.printed_lines() if line.strip()]
    ours = [line for line in lines if "kempner" in line or "Error" in line]
    return (ours or lines or ["it printed nothing"])[-1].strip()


def sources_of(seen: RehearsalRecord) -> dict[str, str]:
    paths = sorted({path for record in seen.undisturbed.records for path in record.sources})
    return {path: Path(path).read_text("utf-8", "replace") for path in paths}


def shown(path: str) -> str:
    """A path, relative to the working directory if it is below."""
    here = Path.cwd()
    full = Path(path)
    return str(full.relative_to(here)) if full.is_relative_to(here) else path


def read_again(seen: RehearsalRecord) -> Sequence[str]:
    """Files that the program has written and a later start has read."""
    wrote = {path for record in seen.undisturbed.records for path in record.wrote}
    starts = [*seen.starts, *([seen.again] if seen.again else [])]
    read = {path for start in starts for record in start.records for path in record.read}
    return sorted(wrote & read)


_CLOCKS = {"time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today"}
_OWN_ENTROPY = {"urandom", "uuid4", "uuid1", "token_bytes", "token_hex", "randbits", "getpid"}
_SEEDED = {"default_rng", "RandomState", "Random", "SeedSequence"}
_FILES = {"listdir", "scandir", "glob", "rglob", "iterdir", "iglob"}


def find_hints(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a source file whose results differ in each run, and why."""
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
            yield f"{place} reads the clock (time)"
        elif called in _OWN_ENTROPY:
            yield f"{place} takes what differs in each process ({called})"
        elif called in _SEEDED and not node.args and not node.keywords:
            yield f"{place} draws without a seed ({called})"
        elif called in _FILES and id(node) not in sorted_calls:
            yield f"{place} takes files in the order of their folder ({called})"
        elif called == "hash":
            yield f"{place} calls hash(), which differs in each process"


def _called(node: ast.Call) -> str:
    func = node.func
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


MOST = 6
"""Most sentences about variables."""

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
    """A sentence for each variable, or for all weights of a module together."""
    groups: dict[tuple[str, str], list[Changed]] = defaultdict(list)
    for change in changes:
        whole = change.kind in ("weight", "buffer", "names")
        groups[_root(change.name) if whole else change.name, change.kind].append(change)
    order = ["names", "weight", "buffer", "optimizer", "scheduler", "generator", "object"]
    rank = lambda key: order.index(key[1]) if key[1] in order else len(order)  # noqa: E731
    keys = sorted(groups, key=rank)
    sentences = [_about(name, kind, groups[name, kind]) for name, kind in keys[:MOST]]
    more = len(keys) - MOST
    return [*sentences, f"and {more} more variables"] if more > 0 else sentences


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
    """Explain a difference if all recorded variables were restored."""
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
    """Explain why two undisturbed runs differ."""
    one = findings.first[0] if findings.first else None
    sentences = [
        "two undisturbed runs differ"
        + (f": {_FIELDS[one.field]} from step {one.step}" if one is not None else "")
        + ": no resume can be exact"
    ]
    sentences += [
        f"it reads {shown(path)}, which an earlier start has written" for path in read_again(seen)
    ]
    sets = [change for change in findings.changes if change.kind == "set"]
    hints = [h for path, text in sources_of(seen).items() for h in find_hints(shown(path), text)]
    if seen.again is not None and not differences(seen.undisturbed.records, seen.again.records):
        sentences.append(
            "the order of a set, or hash(), differs in each process (PYTHONHASHSEED): sort "
            + (", ".join(f"`{change.name}`" for change in sets) or "what is iterated over")
        )
        return sentences
    sentences += hints
    others = [change for change in findings.changes if change.kind != "set"]
    return sentences + [
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
    """The text of the report, and the exit code."""
    findings = judge(seen)
    lines = [*_table(findings.rows), ""]
    lines += [f"- {sentence}" for sentence in explain(seen, findings)]
    lines += _outside(seen)
    if findings.output_only:
        names = ", ".join(f"`{name}`" for name in sorted(set(findings.output_only))[:MOST_FILES])
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
