"""Reads the records of a rehearsal's ranks, and compares a disturbed run with the undisturbed one
in the same steps.

Also decides, by reading the program, whether training depends on a variable: it does not if its
value only goes into output or logs, directly or through other such names. In doubt it does.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variable:
    """A variable of the program: its kind, a digest, and a description."""

    kind: str
    digest: str
    words: str


@dataclass(frozen=True)
class StepStart:
    """The program's state at the start of a step."""

    variables: Mapping[str, Variable]
    generators: Mapping[str, str]
    iterators: tuple[str, ...]


@dataclass(frozen=True)
class StepResult:
    """The results of a step."""

    samples: tuple[str, ...]
    losses: tuple[float, ...]
    rates: Mapping[str, list[float]]
    gradients: Mapping[str, str]
    weights: Mapping[str, str]
    torch_generator: str
    batches: int


@dataclass
class RankRecord:
    """The record of one rank in one start of the program."""

    began: dict[int, StepStart] = field(default_factory=dict)
    done: dict[int, StepResult] = field(default_factory=dict)
    evaluations: dict[int, list[str]] = field(default_factory=dict)
    """Digests of evaluated batches, by the last step that had begun."""
    saved: list[int] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    """The program's own Python files."""
    wrote: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    called: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """The first step that began; 0 if none did."""
        return min(self.began, default=0)

    @property
    def last(self) -> int:
        """The last completed step; 0 if none is."""
        return max(self.done, default=0)


def read_record(path: Path) -> RankRecord:
    """The record of a rank; empty if it has written none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return parse(lines)


def parse(lines: Iterable[str]) -> RankRecord:
    """Parse the lines of a record; skips an incomplete last line of a killed rank."""
    record = RankRecord()
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        _take(record, line)
    return record


def _take(record: RankRecord, line: dict[str, Any]) -> None:
    if "began" in line:
        variables = {name: Variable(*seen) for name, seen in line["variables"].items()}
        began = StepStart(variables, line["globals"], tuple(line["iterators"]))
        record.began[line["began"]] = began
        record.sources |= set(line["files"])
    elif "ended" in line:
        step = line["ended"]
        names = ("rates", "gradients", "weights", "torch_generator", "batches")
        same = {name: line[name] for name in names}
        record.done[step] = StepResult(tuple(line["samples"]), tuple(line["losses"]), **same)
        record.evaluations.setdefault(step, []).extend(line["evaluation"])
    elif "after" in line:
        record.evaluations.setdefault(line["after"], []).extend(line["evaluation"])
    elif "saved" in line:
        record.saved.append(line["saved"])
    elif "wrote" in line:
        record.wrote, record.read = tuple(line["wrote"]), tuple(line["read"])
        record.called = tuple(line["called"])


COMPARED: dict[str, Callable[[StepResult], object]] = {
    "samples": lambda done: done.samples,
    "generators": lambda done: done.torch_generator,
    "losses": lambda done: done.losses,
    "gradients": lambda done: done.gradients,
    "rate": lambda done: done.rates,
    "weights": lambda done: done.weights,
}
"""The compared results of a step, in causal order."""


@dataclass(frozen=True)
class StepDifference:
    """The first step in which a result differs, and its rank."""

    field: str
    step: int
    rank: int


@dataclass(frozen=True)
class Changed:
    """A variable that differs at the first step of a start from the undisturbed run."""

    name: str
    kind: str
    before: Variable
    now: Variable
    anew: bool
    """Whether it has the value of the program's first start."""


def differences(
    undisturbed: Sequence[RankRecord], other: Sequence[RankRecord]
) -> list[StepDifference]:
    """The differences in the steps that both have done, the earliest step first."""
    found = []
    for rank, (expected, seen) in enumerate(zip(undisturbed, other, strict=True)):
        for name, value in COMPARED.items():
            for step in sorted(expected.done.keys() & seen.done.keys()):
                if _differ(value(expected.done[step]), value(seen.done[step]), name):
                    found.append(StepDifference(name, step, rank))
                    break
    order = list(COMPARED)
    return sorted(found, key=lambda one: (one.step, order.index(one.field), one.rank))


def _differ(expected: object, seen: object, field: str) -> bool:
    """Weights are compared only for optimizers that have stepped in both."""
    if field == "weights" and isinstance(expected, Mapping) and isinstance(seen, Mapping):
        return any(expected[name] != seen[name] for name in expected.keys() & seen.keys())
    return expected != seen


def lost_evaluations(
    undisturbed: Sequence[RankRecord], parts: Sequence[Sequence[RankRecord]]
) -> list[StepDifference]:
    """Evaluations of the undisturbed run that no start repeated."""
    found = []
    for rank, expected in enumerate(undisturbed):
        made: dict[int, list[list[str]]] = {}
        for part in parts:
            for step, digests in part[rank].evaluations.items():
                # An evaluation that a resume makes up for comes before its first step.
                at = step or part[rank].first - 1
                made.setdefault(at, []).append(digests)
        for step, digests in sorted(expected.evaluations.items()):
            if digests and not any(_contains(seen, digests) for seen in made.get(step, [])):
                found.append(StepDifference("evaluation", step, rank))
                break
    return found


def _contains(seen: Sequence[str], digests: Sequence[str]) -> bool:
    """Whether an evaluation is part of `seen`: a resume may evaluate more."""
    size = len(digests)
    return any(list(seen[n : n + size]) == list(digests) for n in range(len(seen) - size + 1))


def changed(undisturbed: RankRecord, other: RankRecord, step: int) -> list[Changed]:
    if step not in undisturbed.began or step not in other.began:
        return []
    start = undisturbed.began[undisturbed.first].variables
    before, now = undisturbed.began[step].variables, other.began[step].variables
    found = [
        Changed(name, seen.kind, seen, now[name], start.get(name) == now[name])
        for name, seen in before.items()
        if name in now and now[name].digest != seen.digest
    ]
    return found + _generators(undisturbed, other, step)


def _generators(undisturbed: RankRecord, other: RankRecord, step: int) -> list[Changed]:
    """The global generators that steps draw from, and whose state differs."""
    names = {"numpy": "NumPy's global generator", "random": "Python's global generator"}
    found = []
    for key, name in names.items():
        expected = undisturbed.began[step].generators[key]
        seen = other.began[step].generators[key]
        if expected != seen and _drawn_from(undisturbed.began, key):
            before, now = (Variable("generator", digest, "") for digest in (expected, seen))
            found.append(Changed(name, "generator", before, now, anew=False))
    return found


def _drawn_from(began: Mapping[int, StepStart], key: str) -> bool:
    return len({seen.generators[key] for seen in began.values()}) > 1


def samples_elsewhere(
    undisturbed: Sequence[RankRecord], other: Sequence[RankRecord], after: int
) -> bool | None:
    """Whether another number of ranks had the next samples, each once. None if unknown: each rank
    draws its own, or both have no samples in common."""
    expected = _rows(undisturbed, after)
    seen = _rows(other, after)
    if not set().union(*expected) & set().union(*seen):
        return None
    if _draws_its_own(undisturbed, other):
        return None
    wanted = [row for rows in expected for row in rows]
    got = [row for rows in seen for row in rows]
    size, total = 0, min(len(wanted), len(got))
    for rows in expected:
        if size + len(rows) > total:
            break
        size += len(rows)
    # Whole steps of the undisturbed run; for a shorter run, any subset of its next step.
    if size == 0:
        return not Counter(got) - Counter(wanted[: len(expected[0])])
    return Counter(wanted[:size]) == Counter(got[:size])


def _draws_its_own(undisturbed: Sequence[RankRecord], other: Sequence[RankRecord]) -> bool:
    """Whether each rank had the same samples in each step as on more ranks, and none came twice:
    then they are drawn by step and rank, and not from a data set."""
    same = all(
        done.samples == expected.done[step].samples
        for expected, seen in zip(undisturbed, other, strict=False)
        for step, done in seen.done.items()
        if step in expected.done
    )
    rows = [row for record in undisturbed for done in record.done.values() for row in done.samples]
    return same and len(set(rows)) == len(rows)


def _rows(records: Sequence[RankRecord], after: int) -> list[list[str]]:
    """The samples of all ranks for each step after one."""
    steps = sorted({step for record in records for step in record.done if step > after})
    return [
        [row for record in records if step in record.done for row in record.done[step].samples]
        for step in steps
    ]


_TELLS = {
    *("print", "debug", "info", "warning", "error", "exception", "log", "write", "writelines"),
    *("add_scalar", "add_scalars", "log_metrics", "log_dict", "set_postfix", "set_description"),
    *("set_postfix_str", "echo", "say", "pprint"),
}
"""Calls whose arguments are only output."""

_PURE = {
    *("sum", "len", "min", "max", "abs", "float", "int", "round", "str", "repr", "format"),
    *("sorted", "list", "tuple", "dict", "zip", "enumerate", "range", "mean", "median", "fmean"),
    *("time", "perf_counter", "monotonic", "item", "detach", "cpu", "tolist", "get", "join"),
    *("append", "appendleft", "extend", "update", "add", "items", "values", "keys", "copy"),
}
"""Calls whose arguments flow into their result or their object, and nowhere else."""

_CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"}

_MATTERS = "training"
"""The target of a value that may affect training."""


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
    # Values put into objects that the program has not made itself may be read elsewhere.
    foreign = {f"{name}[]" for name in flows if name not in containers}
    for targets in flows.values():
        for target in [target for target in targets if target.endswith("[]")]:
            targets.add(_MATTERS if target in foreign else target.removesuffix("[]"))
    matters = {name for name, targets in flows.items() if _MATTERS in targets}
    while more := {n for n, targets in flows.items() if n not in matters and targets & matters}:
        matters |= more
    return frozenset(matters)


def _loaded(node: ast.AST, functions: Collection[str]) -> str | None:
    """The name whose value is read here, if any; `functions` are the program's own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        call = node.parent  # type: ignore[attr-defined]
        is_method = isinstance(call, ast.Call) and call.func is node
        return None if is_method and node.attr not in functions else node.attr
    return None


def _targets(node: ast.AST) -> set[str]:
    """The targets of an expression's value: names, or `_MATTERS`; empty if it is only output."""
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
        # A method may change its object, and its result flows on; a function is no variable.
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
    """The object that a statement such as `meter.update(loss)` changes."""
    alone = isinstance(call.parent, ast.Expr)  # type: ignore[attr-defined]
    if alone and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return call.func.value.id
    return ""


def _targets_of_attribute(node: ast.AST, attribute: ast.Attribute) -> set[str]:
    """The targets of an object by a use of its attribute: none if that is only read, since the
    attribute is examined by itself."""
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
    """The name of a variable or attribute, also if it is indexed."""
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
    """Whether the statements are only output."""
    return all(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _name_of(statement.value.func) in _TELLS
        for statement in statements
    )
