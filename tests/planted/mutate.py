"""Draws bugs by a seed, so that which decisions go wrong is not the choice of their tests' author.

    python tests/planted/mutate.py SEED [--count N] [--spare N]

prints a share of the N bugs for each subject, and some to spare: mutations of its modules in the
order in which the seed draws them, an operator first, each as likely as another, then one of its
places. A mutation that no user could notice is left out by hand, for the next one of its subject;
bugs.toml says which, and why.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "slots": ("checkpoint/slots/*.py", "checkpoint/tensors/step_slots.py"),
    "buddies": ("supervisor/launchers/agents/buddy/*.py",),
    "agents": ("supervisor/launchers/launcher.py", "supervisor/launchers/agents/*.py"),
    "joining": (
        "supervisor/joining.py",
        "supervisor/launchers/run_nodes.py",
        "supervisor/launchers/agents/invitation.py",
    ),
    "samplers": ("data/serve/sampler.py", "data/serve/sampling_order.py", "data/serve/places.py"),
    "trainer": ("integrations/transformers_trainer/*.py", "integrations/transformers.py"),
    "lightning": ("integrations/lightning*.py",),
    "survive": ("training/survive.py", "training/watch.py"),
    "leaving": ("training/own_loop.py",),
    "homes": ("training/homes.py",),
    "identity": ("run/record/identity.py", "run/record/program.py"),
    "convert": ("checkpoint/convert/*.py", "cli/checkpoint/hugging_face.py"),
    "plan": ("training/plan/*.py", "model/spec/*.py"),
    "report": ("insight/report/*.py",),
    "triage": ("insight/triage/**/*.py",),
    "orphans": ("training/rank_link/rank_link.py",),
}
"""Patterns in kempner of the modules of each subject."""

FLIPPED: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}

Edit = tuple[int, int, str]
"""What of a module's text is replaced, from one place up to another, and by what."""


@dataclass(frozen=True)
class Mutation:
    """`old` is whole lines of the module, and nowhere else in kempner."""

    file: Path
    line: int
    operator: str
    old: str
    new: str

    def __str__(self) -> str:
        where = f"{self.file.relative_to(ROOT)}:{self.line}"
        return f"# {where}, {self.operator}\nold = '''\n{self.old}'''\nnew = '''\n{self.new}'''\n"


class Module:
    """The text of a module, in which nodes of its tree are found again."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """The place of a node's position, whose column counts bytes."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = self.at(node.end_lineno, node.end_col_offset)
        return self.at(node.lineno, node.col_offset), end

    def source(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit:
        """Replace an operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, end, self.text[start:end].replace(old, new, 1)

    def mutation(self, file: Path, edit: Edit, operator: str, everything: str) -> Mutation | None:
        """The edit as lines, with as many before and after as make them unique in `everything`."""
        start, end, new = edit
        first = self.text.count("\n", 0, start)
        last = self.text.count("\n", 0, end)
        for more in range(6):
            above, below = max(0, first - (more + 1) // 2), last + 1 + more // 2
            old = "".join(self.lines[above:below])
            if everything.count(old) == 1:
                begin, stop = self._starts[above], self._starts[min(below, len(self.lines))]
                whole = self.text[begin:start] + new + self.text[end:stop]
                return Mutation(file, first + 1, operator, old, whole)
        return None


def edits(module: Module, tree: ast.Module) -> Iterator[tuple[str, Edit]]:
    """Every mutation of a module, with the name of its operator."""
    for node in _code(tree):
        if isinstance(node, ast.expr):
            yield from _in_expression(module, node)
        elif isinstance(node, ast.stmt):
            yield from _in_statement(module, node)


def _in_expression(module: Module, node: ast.expr) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in FLIPPED:
            old, new = _sign(operator), FLIPPED[type(operator)]
            yield "comparison", module.between(left, right, old, new)
        case ast.BoolOp(operator, [left, right, *_]):
            old, new = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            yield "connective", module.between(left, right, old, new)
        case ast.UnaryOp(ast.Not(), operand):
            yield "negation", (*module.span(node), module.source(operand))
        case ast.Constant(int() as value) if not isinstance(value, bool):
            yield "constant", (*module.span(node), str(value + 1))
            yield "constant", (*module.span(node), str(value - 1))
        case ast.IfExp(test, body, orelse):
            parts = (module.source(part) for part in (orelse, test, body))
            yield "branch", (*module.span(node), "{} if {} else {}".format(*parts))


def _in_statement(module: Module, node: ast.stmt) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Expr(ast.Call()):
            yield "call", (*module.span(node), "pass")
        case ast.If(test, _, [_, *_]):
            yield "branch", (*module.span(test), f"not ({module.source(test)})")
        case ast.FunctionDef(body=[_, *rest], returns=ast.Constant(None)):
            for statement in rest:
                start, _end = module.span(statement)
                yield "return", (start, start, "return\n" + " " * statement.col_offset)


def _sign(operator: ast.cmpop) -> str:
    """How it is written."""
    return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide something: no annotations, f-strings or what is only for a checker."""
    for name, field in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params") or isinstance(tree, ast.JoinedStr):
            continue
        for node in field if isinstance(field, list) else [field]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert):
                continue
            yield node
            yield from _code(node)


def draw(seed: int, subject: str) -> Iterator[Mutation]:
    """The mutations of a subject, in an order that follows from the seed and from the code."""
    chance = random.Random(f"{seed}: {subject}")
    everything = "\0".join(file.read_text() for file in sorted(ROOT.glob("kempner/**/*.py")))
    places: dict[str, list[Mutation]] = {}
    for file in _files(SUBJECTS[subject]):
        module = Module(file.read_text())
        for operator, edit in edits(module, ast.parse(module.text)):
            mutation = module.mutation(file, edit, operator, everything)
            if mutation is not None:
                places.setdefault(operator, []).append(mutation)
    for each in places.values():
        chance.shuffle(each)
    while left := [each for each in places.values() if each]:
        yield chance.choice(left).pop()


def shares(seed: int, count: int) -> dict[str, int]:
    """How many bugs each subject gets; the seed draws those that get one more."""
    each, more = divmod(count, len(SUBJECTS))
    luckier = random.Random(seed).sample(list(SUBJECTS), more)
    return {subject: each + (subject in luckier) for subject in SUBJECTS}


def _files(patterns: Sequence[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in ROOT.glob(f"kempner/{pattern}"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=40, metavar="N")
    parser.add_argument("--spare", type=int, default=3, metavar="N")
    asked = parser.parse_args()
    for subject, share in shares(asked.seed, asked.count).items():
        print(f"# {subject}: {share}\n")
        print(*islice(draw(asked.seed, subject), share + asked.spare), sep="\n")


if __name__ == "__main__":
    main()
