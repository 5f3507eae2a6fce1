"""Maps the keys of a foreign checkpoint to those of kempner: pure, with reasons for refusals.

DCP flattens a nested state into keys joined by dots. What is obvious is taken: `model.<parameter>`
as it is; `optimizer` or `optim`, with or without `state` between (as `get_state_dict` of
`torch.distributed.checkpoint.state_dict` gives it); all of it below one more name, such as `app`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kempner.run.process.exit_codes import DataError

_OPTIMIZERS = ("optimizer.", "optim.")
_GROUPS = "param_groups"
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""What torch puts into the names of modules that it wraps."""


@dataclass(frozen=True)
class Fit:
    """`names` maps their keys to ours; `left_out` is what a run needs nothing of."""

    names: dict[str, str]
    left_out: tuple[str, ...]


def fit(tensors: Collection[str], others: Collection[str]) -> Fit:
    """Map the keys of `tensors`, and judge those of `others`, which are no tensors.

    Outside of model and optimizer everything is left out: schedules, counters and random states
    follow from the configuration and the step; so do the optimizer's groups. Raises `DataError`,
    naming keys, if something of the model or of the optimizer's state does not fit.
    """
    root = _root([*tensors, *others])
    names: dict[str, str] = {}
    left_out, misfits, taken = [], [], set()
    parameters = {
        _unwrapped(key.removeprefix(root)) for key in tensors if key.startswith(f"{root}model.")
    }
    for key in sorted({*tensors, *others}):
        ours, needed = _translate(_unwrapped(key.removeprefix(root)), parameters)
        if not key.startswith(root) or not needed:
            before, groups, _ = key.partition(_GROUPS)
            left_out.append(before + groups)
        elif ours is None or key in others or ours in taken:
            misfits.append(key)
        else:
            names[key] = ours
            taken.add(ours)
    if misfits:
        raise DataError(
            f"{listed(misfits)} cannot be imported: what belongs to the model must be a tensor, "
            "and what belongs to the optimizer a tensor that is called "
            "optimizer.state.<parameter>.<entry>, as get_state_dict of "
            "torch.distributed.checkpoint.state_dict calls it"
        )
    return Fit(names, tuple(dict.fromkeys(left_out)))


def listed(keys: Collection[str]) -> str:
    """The first few of some keys, in words."""
    first = ", ".join(list(keys)[:3])
    return f"{first} and {len(keys) - 3} more" if len(keys) > 3 else first


def _root(keys: Iterable[str]) -> str:
    """What stands before `model.` in every key of the model: nothing, or one name and a dot."""
    keys = list(keys)
    if any(key.startswith("model.") for key in keys):
        return ""
    roots = {f"{parts[0]}." for key in keys if (parts := key.split("."))[1:2] == ["model"]}
    if len(roots) != 1:
        raise DataError(
            f"it has no keys model.<parameter>, but {listed(sorted(keys)) or 'none'}; save "
            '{"model": ..., "optimizer": ...} with torch.distributed.checkpoint'
        )
    return roots.pop()


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _translate(key: str, parameters: Collection[str]) -> tuple[str | None, bool]:
    """Our name for a key, if there is one, and whether the state would miss it without."""
    if key.startswith("model."):
        return key, True
    prefix = next((prefix for prefix in _OPTIMIZERS if key.startswith(prefix)), None)
    if prefix is None:
        return None, False
    rest = key.removeprefix(prefix)
    for name in (rest, rest.removeprefix("state.")):
        if f"model.{name.rpartition('.')[0]}" in parameters:
            return f"optimizer.{name}", True
    return None, not rest.startswith(_GROUPS)
