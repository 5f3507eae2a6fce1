"""The table of causes: every row can be reached, and every cause has its words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from kempner.insight.triage.rules import Sign
from kempner.insight.triage.table.everything import CAUSES, TABLE, suspicious

MOST = 400
"""Texts that are made of a pattern."""


def texts(parsed: Any) -> Iterator[str]:
    """What a parsed pattern matches, with one text for each alternative."""
    parts = [list(islice(_of(operation, argument), 40)) for operation, argument in parsed]
    for chosen in islice(product(*parts), MOST):
        yield "".join(chosen)


def _of(operation: Any, argument: Any) -> Iterator[str]:
    if operation is code.LITERAL:
        yield chr(argument)
    elif operation is code.IN:
        yield _one_of(argument)
    elif operation is code.BRANCH:
        for branch in argument[1]:
            yield from texts(branch)
    elif operation is code.SUBPATTERN:
        yield from texts(argument[3])
    elif operation in (code.MAX_REPEAT, code.MIN_REPEAT):
        least, _, inner = argument
        for text in texts(inner):
            yield text * least
    elif operation in (code.ANY, code.NOT_LITERAL):
        yield "~"
    else:  # a place, or a look around: nothing of its own
        yield ""


def _one_of(choices: Any) -> str:
    kind, value = choices[0]
    if kind is code.LITERAL:
        return chr(value)
    if kind is code.RANGE:
        return chr(value[0])
    if kind is code.NEGATE:
        return "~"
    words = {code.CATEGORY_DIGIT: "1", code.CATEGORY_SPACE: " ", code.CATEGORY_WORD: "w"}
    return words.get(value, "~")


@pytest.mark.parametrize("sign", [sign for sign, _ in TABLE], ids=lambda sign: sign.pattern)
def test_what_a_sign_matches_is_looked_at(sign: Sign) -> None:
    flags = re.IGNORECASE if sign.pattern.startswith("(?i)") else 0
    pattern = sign.pattern.removeprefix("(?i)")
    made = list(texts(parser.parse(pattern, flags)))
    assert made
    unseen = [text for text in made if sign.regex.search(text) and not suspicious(text)]
    assert unseen == []


def test_noise_is_not_looked_at() -> None:
    line = "[rank3]: 2026-01-01 10:00:00,123 - INFO - train - step 12 loss 2.3 tokens/s 123 lr 1e-4"
    assert not suspicious(line)


def test_every_cause_says_what_it_is_and_what_to_do() -> None:
    for name, cause in CAUSES.items():
        assert name == cause.name
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", name)
        assert cause.says
        assert cause.do
        assert not cause.says.endswith(".")
        assert not cause.do.endswith(".")
