"""What an integration says where the library that it is for is not installed."""

from __future__ import annotations


def without_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """What to raise where an integration cannot import its library: `error`, with what to do."""
    if (error.name or "").partition(".")[0] not in (extra, "accelerate"):
        return error  # the library is there, and lacks another
    advice = f"kempner.integrations.{extra} needs {error.name}: pip install 'kempner[{extra}]'"
    return ModuleNotFoundError(advice, name=error.name)
