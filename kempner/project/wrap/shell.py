"""Parses a shell script: its commands, their context, and their redirections.

The grammar is tree-sitter's, which keeps the position of every word and parses around errors. It is
loaded at the first use.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_EXPANSIONS = frozenset(
    (
        *("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"),
        *("process_substitution", "ansi_c_string", "brace_expression"),
    )
)
_WITHIN = {
    "for_statement": "a loop",
    "c_style_for_statement": "a loop",
    "while_statement": "a loop",
    "if_statement": "a branch",
    "case_statement": "a branch",
    "function_definition": "a function",
    "subshell": "a subshell",
    "negated_command": "a negation",
    "pipeline": "a pipe",
}
"""Constructs around a command, in words."""

BACKGROUND = "the background"
"""The context of a command that is followed by `&`, itself or with what is around it."""

_ELSEWHERE = ("command_substitution", "process_substitution")
_HARMLESS_AFTER = ("exit", "true", ":", "return")


class CannotWrapError(Exception):
    """Why a script is refused: a clause that follows `line N` and a space or a colon."""


@dataclass(frozen=True)
class Word:
    """A word of a command; `start` and `end` are bytes of the script, `value` is its value in the
    shell, None if that depends on the run."""

    source: str
    start: int
    end: int
    value: str | None


@dataclass(frozen=True)
class Redirect:
    """An operator such as `>`, from byte `start` to `end`, and its file."""

    operator: str
    start: int
    end: int
    file: str


@dataclass(frozen=True)
class Command:
    """A simple command. `start` is its first byte, including assignments; `head` and `tail` bound
    its statement, which begins a line of the script or follows a `;`. `within` lists the constructs
    around it, from the outside in. `alone`: the statement is just this command; `last`: only the
    end of the script follows; `guards`: what follows on its line depends on its exit code."""

    words: tuple[Word, ...]
    line: int
    start: int
    head: int
    tail: int
    within: tuple[str, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    alone: bool = True
    last: bool = False
    guards: bool = False

    @property
    def name(self) -> str:
        """The first word without its folders; empty if it depends on the run."""
        return (self.words[0].value or "").rpartition("/")[2]


@dataclass(frozen=True)
class Script:
    """A parsed script: its commands in order, and the variables that it sets once, to a constant.
    `unsteady` are variables whose value may differ at the next start of the same job. `wrong` is
    the first line that cannot be parsed, 0 if there is none."""

    commands: tuple[Command, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unsteady: frozenset[str] = frozenset()
    wrong: int = 0

    def changes(self, source: str) -> bool:
        return _is_unsteady(source, self.unsteady)


def parse(text: bytes) -> Script:
    root = _parser().parse(text).root_node
    if root.has_error:
        return Script(wrong=min((n.start_point[0] + 1 for n in _errors(root)), default=1))
    commands = tuple(command for node in _commands(root) if (command := _command(node, text)))
    return Script(commands, _variables(root), _unsteady(root))


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _errors(node: Node) -> Iterator[Node]:
    if node.is_error or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _errors(child)


def _commands(node: Node) -> Iterator[Node]:
    if node.type == "command":
        yield node
    elif node.type not in _ELSEWHERE:
        for child in node.named_children:
            yield from _commands(child)


def _command(node: Node, text: bytes) -> Command | None:
    parts = [c for c in node.named_children if not c.type.endswith(("_redirect", "comment"))]
    assigned = [c for c in parts if c.type == "variable_assignment"]
    words = tuple(_word(c) for c in parts if c.type != "variable_assignment")
    if not words:
        return None
    chain = list(_ancestors(node))
    statement = chain[-1] if chain else node
    alone = all(above.type == "redirected_statement" for above in chain)
    start = _first_on_line(assigned, words[0].start, text)
    within = tuple(_WITHIN[above.type] for above in reversed(chain) if above.type in _WITHIN)
    if any(_is_in_background(above) for above in (node, *chain)):
        within = (BACKGROUND, *within)
    return Command(
        words,
        text.count(b"\n", 0, words[0].start) + 1,
        start,
        start if alone else statement.start_byte,
        statement.end_byte,
        within,
        tuple(_redirects(node, chain)),
        alone,
        _is_last(statement),
        _guards((node, *chain)),
    )


def _ancestors(node: Node) -> Iterator[Node]:
    """The nodes around a command, from the inside out, without the script itself."""
    above = node.parent
    while above is not None and above.parent is not None:
        yield above
        above = above.parent


def _word(node: Node) -> Word:
    source = (node.text or b"").decode(errors="surrogateescape")
    return Word(source, node.start_byte, node.end_byte, _constant(node, source))


def _constant(node: Node, source: str) -> str | None:
    if _expands(node):
        return None
    try:
        found = shlex.split(source)
    except ValueError:
        return None
    return found[0] if len(found) == 1 else ("" if not found else None)


def _expands(node: Node) -> bool:
    return node.type in _EXPANSIONS or any(_expands(child) for child in node.named_children)


def _first_on_line(assigned: list[Node], start: int, text: bytes) -> int:
    """The first byte of a command's assignments; the grammar includes those of lines before."""
    for node in reversed(assigned):
        if b"\n" in text[node.end_byte : start].replace(b"\\\n", b""):
            break
        start = node.start_byte
    return start


def _redirects(node: Node, chain: list[Node]) -> Iterator[Redirect]:
    """The redirections of a command, and of a statement around it."""
    holders = [node, *(above for above in chain if above.type == "redirected_statement")]
    for holder in holders:
        for child in holder.named_children:
            if child.type.endswith("_redirect"):
                operator = next((c for c in child.children if not c.is_named), child.children[0])
                files = [c for c in child.named_children if c.type != "file_descriptor"]
                file = (files[-1].text or b"").decode(errors="replace") if files else ""
                kind = operator.type if child.type == "file_redirect" else "<<"
                yield Redirect(kind, operator.start_byte, operator.end_byte, file)


def _is_in_background(node: Node) -> bool:
    following = node.next_sibling
    return following is not None and following.type == "&"


def _is_last(statement: Node) -> bool:
    after = statement.next_named_sibling
    while after is not None:
        words = (after.text or b"").split(maxsplit=1)
        if after.type != "comment" and words[:1] != [b"exit"]:
            return False
        after = after.next_named_sibling
    return True


def _guards(nodes: tuple[Node, ...]) -> bool:
    for below, above in pairwise(nodes):
        if above.type != "list" or below == above.named_children[-1]:
            continue
        following = (above.named_children[-1].text or b"").split(maxsplit=1)
        operator = next((c.type for c in above.children if not c.is_named), "")
        name = following[0].decode(errors="replace") if following else ""
        if operator != "||" or name not in _HARMLESS_AFTER:
            return True
    return False


def _variables(root: Node) -> dict[str, str]:
    found: dict[str, list[str | None]] = {}
    for node in _assignments(root):
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        text = None if value is None else _word(value).value
        if name is not None:
            found.setdefault((name.text or b"").decode(errors="replace"), []).append(text)
    once = {name: values[0] for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in once.items() if value is not None}


_UNSTEADY = re.compile(
    r"\b(mktemp|uuidgen|hostname|hostnames|date)\b|\$\$|\$\{?(S?RANDOM|EPOCH\w+|SECONDS|HOSTNAME|"
    r"SLURM_(JOB_)?NODELIST|SLURMD_NODENAME|SLURM_RESTART_COUNT)\b"
)
"""Expansions and commands whose value differs at each start, or on other nodes."""


def _is_unsteady(source: str, names: Iterable[str]) -> bool:
    if "$" not in source and "`" not in source:
        return False
    return bool(_UNSTEADY.search(source)) or any(
        re.search(rf"\$\{{?{name}\b", source) for name in names
    )


def _unsteady(root: Node) -> frozenset[str]:
    found: set[str] = set()
    for node in _assignments(root):  # in order: each may use earlier ones
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        source = "" if value is None else (value.text or b"").decode(errors="replace")
        if name is not None and _is_unsteady(source, found):
            found.add((name.text or b"").decode(errors="replace"))
    return frozenset(found)


def _assignments(node: Node) -> Iterator[Node]:
    if node.type == "variable_assignment":
        yield node
    for child in node.named_children:
        yield from _assignments(child)
