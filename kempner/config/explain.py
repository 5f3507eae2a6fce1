"""Type and meaning of each configuration key, read from the sections' types and docstrings: the
output of `kempner config explain`, and the source of docs/configuration_keys.md."""

from __future__ import annotations

import ast
import inspect
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kempner.config.errors import ConfigError, quote, unknown
from kempner.config.loading import known_keys
from kempner.config.section import PURE, Key, Section, expand_home
from kempner.config.sections import Config

_WIDTH = 96
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_ONE_AND_MANY: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "switches"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "texts"),
}


@dataclass(frozen=True)
class KeyExplanation:
    """One key: its dotted `name`, its `kind` (type and bounds in words), the `unit` of a number,
    the meanings of listed `values`, its default in TOML (empty if not set), and its docstring as
    one line."""

    name: str
    kind: str
    unit: str
    values: Mapping[str, str]
    default: str
    example: object
    meaning: str

    @property
    def takes(self) -> str:
        """Type, bounds and unit: `whole number above 0 (steps)`."""
        return f"{self.kind} ({self.unit})" if self.unit not in ("", PURE) else self.kind

    @property
    def override(self) -> str:
        value = self.example if isinstance(self.example, str) else toml_value(self.example)
        return shlex.quote(f"--{self.name}={value}")


@dataclass(frozen=True)
class Table:
    """A section, or a table in one: its keys in order, and its inner tables."""

    name: str
    meaning: str
    keys: Sequence[KeyExplanation]
    tables: Sequence[Table] = ()

    def all(self) -> Iterator[KeyExplanation]:
        """The keys of this table and of its inner tables."""
        yield from self.keys
        for table in self.tables:
            yield from table.all()


def tables() -> list[Table]:
    return list(_table("", Config).tables)


def explain(name: str) -> str:
    """Explain a key, each key of that name, a section, or (empty) list all sections. Raises
    `ConfigError`, with the most similar name, if there is none."""
    every = [table for top in tables() for table in (top, *top.tables)]
    known = {name: table for table in every for name in (table.name.rpartition(".")[2], table.name)}
    if not name:
        lines = _listed({f"[{top.name}]": top.meaning for top in tables()})
        return "\n".join(
            [*lines, "", "kempner config explain SECTION lists the keys of a section."]
        )
    name = name.strip("[]").removeprefix("--").partition("=")[0]
    if name in known:
        return _table_text(known[name])
    keys = [key for table in every for key in table.keys]
    found = [key for key in keys if key.name == name] or [
        key for key in keys if key.name.rpartition(".")[2] == name
    ]
    if not found:
        raise ConfigError(unknown(name.split("."), [], known_keys()))
    return "\n\n".join(map(_key_text, found))


def toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {toml_value(v)}' for key, v in value.items())} }}"
    return quote(value)


def _table(name: str, kind: type[Section], about: str = "") -> Table:
    prefix = f"{name}." if name else ""
    inner = {key: found for key, f in kind.model_fields.items() if (found := _section_of(f))}
    keys, docstrings = (k for k in kind.model_fields if k not in inner), _docstrings(kind)
    return Table(
        name,
        _one_line(f"{kind.__doc__} {about}"),
        [_key(f"{prefix}{k}", kind.model_fields[k], docstrings.get(k, "")) for k in keys],
        [_table(f"{prefix}{k}", found, docstrings.get(k, "")) for k, found in inner.items()],
    )


def _docstrings(kind: type[Section]) -> dict[str, str]:
    """The docstrings below a section's keys. Pydantic reads them as well (its setting
    `use_attribute_docstrings`), but for all sections, at each start of a process."""
    found = dict[str, str]()
    for base in (each for each in reversed(kind.__mro__) if issubclass(each, Section)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for key, below in pairwise(tree.body):
            if isinstance(key, ast.AnnAssign) and isinstance(below, ast.Expr):
                name, docstring = ast.unparse(key.target), ast.literal_eval(below.value)
                found[name] = inspect.cleandoc(docstring)
    return found


def _section_of(given: FieldInfo) -> type[Section] | None:
    kind = given.annotation
    return kind if inspect.isclass(kind) and issubclass(kind, Section) else None


def _key(name: str, given: FieldInfo, meaning: str) -> KeyExplanation:
    key = next((data for data in given.metadata if isinstance(data, Key)), Key())
    spelled = _Type.of(given.annotation, given.metadata)
    default = given.get_default(call_default_factory=True)
    example = key.example
    if example is None and spelled.base is bool:
        example = not default
    elif example is None:
        example = next((value for value in spelled.choices if value != default), None)
    return KeyExplanation(
        name,
        key.form or spelled.words(),
        key.unit,
        {**dict.fromkeys(spelled.choices, ""), **key.values},
        "" if default is None else toml_value(default),
        example,
        _one_line(meaning),
    )


@dataclass(frozen=True)
class _Type:
    """The parsed annotation of a key, without `None`."""

    base: Any
    constraints: Sequence[Any] = ()
    choices: Sequence[str] = ()
    item: _Type | None = None

    @classmethod
    def of(cls, annotation: Any, given: Sequence[Any] = ()) -> _Type:
        """Parse an annotation; `given` are further constraints of the field."""
        constraints = list(given)
        while True:
            origin, arguments = get_origin(annotation), get_args(annotation)
            if origin is Annotated:
                annotation, *more = arguments
                constraints += [c for one in more for c in getattr(one, "metadata", None) or [one]]
            elif origin in (Union, UnionType):
                (annotation,) = (one for one in arguments if one is not NoneType)
            else:
                break
        if origin is Literal:
            return cls(str, constraints, [str(value) for value in arguments])
        if origin is list:
            item = cls.of(arguments[0])
            return cls(list, constraints, item.choices, item)
        return cls(origin or annotation, constraints)

    def words(self, *, many: bool = False) -> str:
        """In words, such as `whole number above 0`; `many` for the items of a list."""
        if self.item is not None:
            count = "".join(f"{number} " for number in self._all("min_length"))
            return f"list of {count}{self.item.words(many=True)}"
        if self.choices:
            return f"{'' if many else 'one of '}{', '.join(self.choices)}"
        if self.base is dict:
            return "table"
        if expand_home in self._all("func"):
            return "paths" if many else "path"
        bounds = [f"{words} {n:g}" for kind, words in _BOUNDS.items() for n in self._all(kind)]
        return " ".join([_ONE_AND_MANY[self.base][many], " and ".join(bounds)]).rstrip()

    def _all(self, attribute: str) -> list[Any]:
        """This attribute of all constraints that have it, such as `gt` of `Gt(0)`."""
        return [getattr(c, attribute) for c in self.constraints if hasattr(c, attribute)]


def _key_text(key: KeyExplanation) -> str:
    lines = [f"{key.name}: {key.takes}", *_filled(key.meaning)]
    lines += [f"  {line}" for line in _listed(key.values)]
    lines.append(f"  default: {key.default or 'not set'}")
    lines.append(f"  example: {key.override}")
    return "\n".join(lines)


def _table_text(table: Table) -> str:
    listed = {key.name: key.meaning for key in table.all()}
    more = f"kempner config explain {table.keys[0].name} says all that is known of a key."
    return "\n".join([f"[{table.name}]", *_filled(table.meaning), "", *_listed(listed), "", more])


def _filled(text: str) -> list[str]:
    return _wrapped(text, "  ", "  ")


def _listed(meanings: Mapping[str, str]) -> list[str]:
    """Names and the first sentences of their meanings, in two columns."""
    column = max(map(len, meanings), default=0) + 4
    lines = []
    for name, meaning in meanings.items():
        first = f"  {name}".ljust(column)
        text = meaning.partition(". ")[0].rstrip(".")
        lines += _wrapped(text, first, " " * column)
    return lines


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
