"""What an event of the ledger is: a record with a name, and fields that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import TypeAdapter

# The words after a type say what the field holds, with its unit: docs/events.md is made from them.
Step: TypeAlias = Annotated[int, "step"]
RankNumber: TypeAlias = Annotated[int, "rank"]
Place: TypeAlias = Annotated[
    str, "folder below the run of the program's loop whose checkpoint it is; empty for the first"
]
Sentence: TypeAlias = Annotated[str, "for a person to read"]


@dataclass(frozen=True)
class LedgerEvent:
    """One event. Its docstring says who writes it, and when: "By rank 0: when ...".

    An optional field is left out of the line while it has its default.
    """

    name: ClassVar[str]
    """As the ledger and the control channel spell it."""

    def to_fields(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        optional = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in optional or value != optional[name]
        }

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Self:
        """The event that has these fields; others among them are passed over.

        Raises `ValueError` if one is missing, or of another type.
        """
        adapter = _ADAPTERS.get(cls) or _ADAPTERS.setdefault(cls, TypeAdapter(cls))
        event: Self = adapter.validate_python(dict(found))
        return event


_ADAPTERS: dict[type[LedgerEvent], TypeAdapter[Any]] = {}
