"""The error of an integration whose library is not installed."""

from __future__ import annotations


def without_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error to raise if an integration cannot import its library, with the command that
    installs it."""
    if (error.name or "").partition(".")[0] not in (extra, "accelerate"):
        return error  # the library is installed, but lacks another one
    advice = f"kempner.integrations.{extra} needs {error.name}: pip install 'kempner[{extra}]'"
    return ModuleNotFoundError(advice, name=error.name)
