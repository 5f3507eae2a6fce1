"""An integration without its library says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("extra", ["lightning", "transformers"])
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.delitem(sys.modules, f"kempner.integrations.{extra}", raising=False)
    advice = rf"kempner\.integrations\.{extra} needs {extra}: pip install 'kempner\[{extra}\]'"
    with pytest.raises(ModuleNotFoundError, match=advice):
        importlib.import_module(f"kempner.integrations.{extra}")
