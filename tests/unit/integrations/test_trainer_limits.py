"""What a Trainer is refused for, and that the page has the same list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness import ROOT

from kempner.integrations.transformers_trainer.loop import LIMITS, refuse_inexact
from kempner.run.process.exit_codes import UsageError


def trainer(**settings: object) -> Any:
    """With nothing that is refused, but for these settings."""
    names = list(LIMITS)
    chosen = {name: settings.get(name, False) for name in names}
    engines = {f"is_{name.lower()}_enabled": chosen.pop(name) for name in ("DeepSpeed", "FSDP")}
    return SimpleNamespace(args=SimpleNamespace(**chosen), **engines)


def test_a_trainer_without_them_is_taken() -> None:
    refuse_inexact(trainer())


@pytest.mark.parametrize("name", list(LIMITS))
def test_each_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be resumed exactly: ") as refused:
        refuse_inexact(trainer(**{name: True}))
    assert "\n" not in str(refused.value)


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "trainer.md").read_text()
    listed = page[page.index("## What is refused") : page.index("## Evidence")]
    assert [name for name in LIMITS if name not in listed] == []
