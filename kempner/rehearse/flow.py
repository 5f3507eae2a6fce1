"""Does training depend on a variable, or does it only tell people something?

By reading the program: a name is harmless if its value goes nowhere but into what is printed or
logged, directly or through names of which that is true as well. In doubt training depends on it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

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
