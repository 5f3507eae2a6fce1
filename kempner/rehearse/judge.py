"""What came back and what did not, from what a rehearsal has seen.

Does training depend on a variable, or does it only tell people something?

By reading the program: a name is harmless if its value goes nowhere but into what is printed or
logged, directly or through names of which that is true as well. In doubt training depends on it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kempner.rehearse.compare import (
    Changed,
    StepDifference,
    changed,
    differences,
    lost_evaluations,
    samples_elsewhere,
)
from kempner.rehearse.rehearsal import ObservedStart, RehearsalRecord

_TELLS = {
    *("print", "debug", "info", "warning", "error", "exception", "log", "write", "writelines"),
    *("add_scalar", "add_scalars", "log_metrics", "log_dict", "set_postfix", "set_description"),
    *("set_postfix_str", "echo", "say", "pprint"),
}
"""Calls whose arguments people read."""

_PURE = {
    *("sum", "len", "min", "max", "abs", "float", "int", "round", "str", "repr", "format"),
    *("sorted", "list", "tuple", "dict", "zip", "enumerate", "range", "mean", "median", "fmean"),
    *("time", "perf_counter", "monotonic", "item", "detach", "cpu", "tolist", "get", "join"),
    *("append", "appendleft", "extend", "update", "add", "items", "values", "keys", "copy"),
}
"""Calls that hand on what they get, to their result or to what they belong to."""

_CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"}

_MATTERS = "training"
"""Where a value goes that may change what is trained."""


def names_that_matter(sources: Iterable[str]) -> frozenset[str]:
    """The names of variables and attributes on which training may depend."""
    flows: dict[str, set[str]] = defaultdict(set)
    trees = [ast.parse(source) for source in sources]
    containers = {name for tree in trees for name in _containers(tree)}
    functions = {n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.FunctionDef)}
    for tree in trees:
        for parent in ast.walk(tree):
            for child in ast.iter_child_nodes(parent):
                child.parent = parent  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if (name := _loaded(node, functions)) is not None:
                flows[name] |= _targets(node)
    # What is put into something that the program has not made itself is read elsewhere.
    foreign = {f"{name}[]" for name in flows if name not in containers}
    for targets in flows.values():
        for target in [target for target in targets if target.endswith("[]")]:
            targets.add(_MATTERS if target in foreign else target.removesuffix("[]"))
    matters = {name for name, targets in flows.items() if _MATTERS in targets}
    while more := {n for n, targets in flows.items() if n not in matters and targets & matters}:
        matters |= more
    return frozenset(matters)


def _loaded(node: ast.AST, functions: Collection[str]) -> str | None:
    """The name whose value is read here, if one is; `functions` are the program's own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        call = node.parent  # type: ignore[attr-defined]
        is_method = isinstance(call, ast.Call) and call.func is node
        return None if is_method and node.attr not in functions else node.attr
    return None


def _targets(node: ast.AST) -> set[str]:
    """Where the value of an expression goes: names, or `_MATTERS`; nowhere if it is told only."""
    parent: ast.AST = node.parent  # type: ignore[attr-defined]
    if isinstance(parent, ast.Call):
        return _targets_in_call(node, parent)
    if isinstance(parent, ast.Attribute):
        return _targets_of_attribute(node, parent)
    if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return _assigned(parent)
    if isinstance(parent, ast.Return):
        return _function_of(parent)
    if isinstance(parent, ast.Expr):
        return set()
    if isinstance(parent, ast.For) and node is parent.iter:
        return _assigned(parent)
    if isinstance(parent, ast.If) and node is parent.test:
        return set() if _only_tells(parent.body + parent.orelse) else {_MATTERS}
    if isinstance(parent, ast.expr | ast.keyword | ast.comprehension | ast.FormattedValue):
        return _targets(parent)
    return {_MATTERS}


def _targets_in_call(node: ast.AST, call: ast.Call) -> set[str]:
    name = _name_of(call.func)
    if node is call.func:
        # A method changes what it belongs to, and hands on its result; a function is no variable.
        return _targets(call)
    if name in _TELLS:
        return set()
    if name in _PURE:
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        owner = _name_of(receiver) if receiver is not None else ""
        return _targets(call) | ({owner} if owner else set())
    owner = _owner_of(call)
    return {owner} if owner else {_MATTERS}


def _owner_of(call: ast.Call) -> str:
    """What a statement that is nothing but a call of a method changes: `meter.update(loss)`."""
    alone = isinstance(call.parent, ast.Expr)  # type: ignore[attr-defined]
    if alone and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return call.func.value.id
    return ""


def _targets_of_attribute(node: ast.AST, attribute: ast.Attribute) -> set[str]:
    """An object is as important as its attribute that is read, and that is looked at by itself."""
    call = attribute.parent  # type: ignore[attr-defined]
    if not (isinstance(call, ast.Call) and call.func is attribute):
        return set()
    if attribute.attr in _TELLS:
        return set()
    alone = isinstance(call.parent, ast.Expr)  # type: ignore[attr-defined]
    return {_MATTERS} if alone and attribute.attr not in _PURE else _targets(call)


def _assigned(parent: ast.AST) -> set[str]:
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]  # type: ignore[attr-defined]
    names: set[str] = set()
    for target in targets:
        entries = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for entry in entries:
            entry = entry.value if isinstance(entry, ast.Starred) else entry
            inside = "[]" if isinstance(entry, ast.Subscript) else ""
            names.add(f"{_name_of(entry)}{inside}" if _name_of(entry) else _MATTERS)
    return names


def _containers(tree: ast.AST) -> Iterator[str]:
    """The names of containers that the program makes itself."""
    made = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            called = _name_of(node.value.func) if isinstance(node.value, ast.Call) else ""
            if isinstance(node.value, made) or called in _CONTAINERS:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from filter(None, map(_name_of, targets))


def _name_of(node: ast.AST | None) -> str:
    """The name of a variable, of an attribute, or of what is indexed."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _function_of(node: ast.AST) -> set[str]:
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        if not hasattr(node, "parent"):
            return {_MATTERS}
        node = node.parent
    return {_MATTERS} if isinstance(node, ast.Lambda) else {node.name}


def _only_tells(statements: Collection[ast.stmt]) -> bool:
    """Whether nothing but telling people follows from a condition."""
    return all(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _name_of(statement.value.func) in _TELLS
        for statement in statements
    )


ALWAYS = {"weight", "buffer", "names", "optimizer", "scheduler", "generator", "object"}
"""Kinds of variables that must come back, whatever the program does with them."""

IF_USED = {"value", "container", "tensor"}
"""Kinds that must come back if training depends on them."""


class RehearsalVerdict(Enum):
    """How a rehearsal ends."""

    EXACT = "exact"
    DIFFERS = "not exact"
    BY_ITSELF = "not repeatable"
    FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """A line of the table: a start, and what it had in common with the undisturbed run."""

    words: str
    fields: Mapping[str, bool | None]
    """Whether each came back; None where there was none to compare."""


@dataclass
class RehearsalFindings:
    """What there is to say about a rehearsal."""

    verdict: RehearsalVerdict
    rows: list[Row] = field(default_factory=list)
    first: list[StepDifference] = field(default_factory=list)
    """The first differences of the first start that has any."""
    changes: list[Changed] = field(default_factory=list)
    """What did not come back in that start."""
    at: int = 0
    """Its first step."""
    sentences: list[str] = field(default_factory=list)
    told_only: list[str] = field(default_factory=list)
    """What did not come back, and only tells people something."""


def judge(seen: RehearsalRecord) -> RehearsalFindings:
    if seen.undisturbed.failed:
        return _failure("the program itself", seen.undisturbed)
    if seen.starts[-1].failed:
        return _failed_later(seen)
    used = names_that_matter(_sources(seen).values())
    findings = RehearsalFindings(RehearsalVerdict.EXACT)
    findings.rows = [_row(seen, number, used) for number in range(len(seen.starts))]
    _find_first(seen, findings, used)
    _look_elsewhere(seen, findings)
    _compare_files(seen, findings)
    return findings


def _failed_later(seen: RehearsalRecord) -> RehearsalFindings:
    """A start failed: what was found before it, and how it ended."""
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
    """The first start that differs, and how."""
    records = seen.undisturbed.records
    for number, start in enumerate(seen.starts):
        outcome = differences(records, start.records)
        changes = _changes(seen, number) if number or outcome else []
        kept = [c for c in changes if _must_come_back(c, used, bool(outcome))]
        findings.told_only += [c.name for c in changes if c not in kept and c.kind in IF_USED]
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
    """What is otherwise as a start begins, on any rank; not what is otherwise in each process."""
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
    """The variables that differ before anything is disturbed: times, process ids, folders."""
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
    """The names in a path such as `task.norms[3]`."""
    words = name.replace("[", ".[").split(".")
    return [word for word in words if word.isidentifier()] or [name]


def _wrong_place(seen: RehearsalRecord, number: int) -> str:
    """A sentence, if a start did not begin where it was to."""
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
    """What one start had in common with the undisturbed run."""
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
    """Whether the evaluations of this start's steps were made as undisturbed."""
    start, records = seen.starts[number], seen.undisturbed.records
    steps = {s for s, digests in records[0].evaluations.items() if digests}
    own = {s for s in steps if start.first <= s <= start.last}
    if not own:
        return None
    lost = lost_evaluations(records, [p.records for p in seen.starts])
    return not any(one.step in own for one in lost)


def _look_elsewhere(seen: RehearsalRecord, findings: RehearsalFindings) -> None:
    """On another number of ranks: the same state, rates and samples."""
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
    """The last line that it has printed, or the last of kempner's."""
    lines = [line for line in played.said() if line.strip()]
    ours = [line for line in lines if "kempner" in line or "Error" in line]
    return (ours or lines or ["it printed nothing"])[-1].strip()


def _sources(seen: RehearsalRecord) -> dict[str, str]:
    """The program's files of Python."""
    paths = sorted({path for record in seen.undisturbed.records for path in record.sources})
    return {path: Path(path).read_text("utf-8", "replace") for path in paths}


def shown(path: str) -> str:
    """A path as a person has it: from here, if it is below."""
    here = Path.cwd()
    full = Path(path)
    return str(full.relative_to(here)) if full.is_relative_to(here) else path


def sources_by_name(seen: RehearsalRecord) -> dict[str, str]:
    """The same, by names for a person."""
    return {shown(path): text for path, text in _sources(seen).items()}


def read_again(seen: RehearsalRecord) -> Sequence[str]:
    """Files that the program has written, and that a later start has read."""
    wrote = {path for record in seen.undisturbed.records for path in record.wrote}
    starts = [*seen.starts, *([seen.again] if seen.again else [])]
    read = {path for start in starts for record in start.records for path in record.read}
    return sorted(wrote & read)
