"""Base class and field types of all configuration sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def expand_home(path: str) -> str:
    """`path` with a leading `~` or `~user` expanded; otherwise it would name a folder called `~`.
    Raises `ValueError` if there is no such home."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        first = path.partition("/")[0]
        raise ValueError(
            f"the home folder {first} is unknown; write ./{path} for a name that begins with ~"
        ) from None


PURE = "pure number"
"""The `unit` of a number without unit."""


@dataclass(frozen=True, eq=False)
class Key:
    """Documentation of a key besides its type, bounds, default and docstring, for `kempner config
    explain`. A switch, and a key with listed `values` and their meanings, need no `example`. `form`
    is the type in words, if the annotation is not clear enough."""

    unit: str = ""
    example: object = None
    values: Mapping[str, str] = field(default_factory=dict)
    form: str = ""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen table that refuses unknown keys, and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
