"""Selects the checkpoint to resume from and those to abandon (on rank 0), and decides, with
reasons, whether this run may resume from it."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kempner.checkpoint.format.manifest import (
    NO_ATTEMPT,
    Base,
    Identity,
    Manifest,
    data_digest,
    read,
)
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder, parse_aside
from kempner.checkpoint.io.verify import Damage
from kempner.run.process.exit_codes import DataError, UsageError


def choose(committed: Sequence[int], latest: int | None) -> int | None:
    """The step to try next; None if nothing is committed. Steps beyond `latest`, the end of the
    live branch, were abandoned by a rollback, and are the last resort."""
    if latest is None:
        return max(committed, default=None)
    on_branch = [step for step in committed if step <= latest]
    return max(on_branch, default=max(committed, default=None))


def newest(folder: CheckpointFolder) -> int | None:
    """The newest step of the live branch on disk; None if nothing is committed. Considers prepared
    replacements of `latest`, too. Raises `OSError`."""
    committed = folder.committed()
    step = choose(committed, folder.latest())
    late = [s for s in folder.prepared().values() if s in committed]
    return None if step is None else max([step, *late])


def head(folder: CheckpointFolder) -> int | None:
    """As `newest`, but by this process's own knowledge if it has any. Raises `OSError`."""
    step = folder.tip.step
    return step if step is not None and step in folder.committed() else newest(folder)


class MissingError(OSError):
    """The checkpoints of a run are missing."""


def refuse_if_missing(folder: CheckpointFolder, known: int | None) -> None:
    """Raise `MissingError` if the ledger has a checkpoint (`known`) but none exists: with ENOENT if
    the folder is empty (a file system may not be mounted), with ENODATA if folders without files
    are left (they were deleted). Raises `OSError` if the folder cannot be read now, and `DataError`
    if all checkpoints are damaged."""
    if known is None or folder.committed():
        return
    if any(parse_aside(path.name) for path in folder.copies()):
        raise DataError(
            f"no checkpoint in {folder.path} verifies, although the ledger says that step {known} "
            "was committed; those there were are set aside"
        )
    words = (
        f"no checkpoint is there, although the ledger says that step {known} was committed: copy "
        "it back, or, if it was deleted on purpose, start under another run.name"
    )
    raise MissingError(errno.ENOENT if folder.is_bare() else errno.ENODATA, words, str(folder.path))


def choose_to_go_back(branch: Sequence[int], to: int) -> int | None:
    """The step to try next in a rollback to step `to`; None if `branch` is empty. If nothing up to
    `to` verifies, the oldest later one: the data that caused the trouble is skipped in any case."""
    return max((step for step in branch if step <= to), default=min(branch, default=None))


def left_behind(committed: Sequence[int], tip: int | None, step: int) -> list[int]:
    """The steps to set aside before `step` is committed, ascending: those beyond `tip`, the newest
    of the live branch, which would else seem to be part of it; and `step` itself, which is made
    again."""
    return [s for s in committed if s == step or (s < step and (tip is None or s > tip))]


@dataclass(frozen=True)
class Compatibility:
    """`refusals` forbid the resume; `remarks` are worth a line in the log."""

    refusals: tuple[str, ...]
    remarks: tuple[str, ...]

    def sentence(self, checkpoint: Path) -> str:
        return (
            f"cannot continue from {checkpoint}: {'; '.join(self.refusals)}; set it back, or give "
            "the new run another name with --run.name=NAME"
        )


def compare_identities(saved: Identity, now: Identity, accept: Collection[str]) -> Compatibility:
    """Compare the identity in a checkpoint with that of the run that would resume from it. Another
    model or optimizer is always refused; other data or another seed unless `accept` names it
    ("data", "seed"). Another world or mesh is allowed, but then results may differ in the last
    bits."""
    keys = {**saved.model, **now.model} if saved.model else {}
    refusals = [
        f"model.{key} is {_describe_value(now.model, key)} but the checkpoint was made with "
        f"{_describe_value(saved.model, key)}"
        for key in keys
        if now.model.get(key) != saved.model.get(key)
    ]
    begins = now.adapter is not None and saved.adapter is None  # beside this one's weights
    if saved.optimizer not in (None, now.optimizer) and not begins:
        refusals.append(
            f"optimizer.name is {now.optimizer!r} but the checkpoint was made with "
            f"{saved.optimizer!r}, and has the state of that one only"
        )
    if not begins:
        refusals += _other_adapter(saved, now)
    remarks: list[str] = []
    _compare_order(saved, now, accept, refusals, remarks)
    if saved.world != now.world:
        remarks.append(
            f"the checkpoint was written by {saved.world} ranks, now there are {now.world}"
        )
    elif (
        saved.mesh and now.mesh and (was := _divided(saved.mesh)) != (is_now := _divided(now.mesh))
    ):
        remarks.append(
            f"the checkpoint was written on a mesh of {was or 'one rank'}, now it is "
            f"{is_now or 'one rank'}: results may differ in the last bits"
        )
    if saved.origin.host:
        remarks += _host_remarks(saved.origin.host, now.origin.host)
    return Compatibility(tuple(refusals), tuple(remarks))


def _other_adapter(saved: Identity, now: Identity) -> list[str]:
    if saved.adapter is not None and now.adapter is None:
        return ["[adapter] is not set but the checkpoint holds nothing but an adapter"]
    before, after = saved.adapter or {}, now.adapter or {}
    return [
        f"adapter.{key} is {after.get(key)!r} but the checkpoint was made with {before.get(key)!r}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def find_base(folder: CheckpointFolder) -> Base:
    """The checkpoint beside whose weights an adapter is trained: the one that those of this run
    name, or that of an import, which the run begins from. Raises `UsageError` if there is none, as
    `read_base`, and `OSError` if that cannot be seen now."""
    for step in reversed(folder.committed()):
        path = folder.step(step)
        try:
            manifest = read(path, worked=True)
        except DataError:
            continue  # the load sets it aside
        if (base := manifest.identity.base) is not None:
            read_base(folder, base)
            return base
        if manifest.attempt != NO_ATTEMPT:
            raise UsageError(
                f"{path} has a model that was trained whole, and [adapter] trains beside weights "
                f"that stay: import it into a run of its own (kempner checkpoint import {path} "
                "--into RUN), or remove [adapter]"
            )
        return Base(step, data_digest(manifest))
    raise UsageError(
        f"[adapter] trains beside the weights of a model, and {folder.path} has none: import one "
        "first (kempner checkpoint import MODEL --into RUN), or remove [adapter]"
    )


def read_base(folder: CheckpointFolder, base: Base) -> Manifest:
    """The manifest of the checkpoint beside whose weights an adapter was trained. Raises
    `DataError` if it is not there, or another one."""
    path = folder.step(base.step)
    try:
        manifest = read(path)
    except DataError as error:
        raise DataError(
            f"the weights beside which the adapter was trained are gone ({error}); {BRING_BACK}"
        ) from error
    if data_digest(manifest) != base.digest:
        raise DataError(
            f"{path} does not have the weights beside which the adapter was trained; {BRING_BACK}"
        )
    return manifest


def damage_of_base(checkpoint: Path) -> list[Damage]:
    """What is wrong with the checkpoint whose weights this one needs, by its manifest."""
    base = read(checkpoint).identity.base
    try:
        if base is not None:
            read_base(CheckpointFolder(checkpoint.parent), base)
    except DataError as error:
        return [Damage(MANIFEST, str(error))]
    return []


BRING_BACK = "import the same model into another folder, and copy its checkpoint to this place"
"""What to do where the weights of an adapter's model are gone, or others."""


def _compare_order(
    saved: Identity, now: Identity, accept: Collection[str], refusals: list[str], remarks: list[str]
) -> None:
    """Add the refusals and remarks about data and seed, which determine the order of samples."""
    prints = saved.data_fingerprint, now.data_fingerprint
    for what, key, was, is_now in (
        ("data", "data.dataset_path or train.seq_len", *prints),
        ("seed", "train.seed", saved.seed, now.seed),
    ):
        if was is None and is_now is not None:
            remarks.append(f"the checkpoint was imported: assuming that its {what} is this run's")
        if was is None or is_now is None or was == is_now:
            continue
        if what in accept:
            remarks.append(f"continuing with another {what} than the checkpoint's, as requested")
        else:
            refusals.append(
                f"{key} differs from the checkpoint's ({is_now} instead of {was}), so samples "
                f"would repeat or be missed (if that is intended, "
                f'add --checkpoint.accept_changes=["{what}"])'
            )


def _divided(mesh: Mapping[str, int]) -> str:
    """A mesh in words; "fsdp" is an earlier name of a single dimension "shard"."""
    sizes = {"shard" if name == "fsdp" else name: size for name, size in mesh.items() if size > 1}
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _describe_value(model: Mapping[str, Any], key: str) -> str:
    """The value of a key in words; a key that is not recorded has its default."""
    return repr(model[key]) if key in model else "the default"


def _host_remarks(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {saved.get(key)!r} and is {now.get(key)!r}: results may differ in the last bits"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]
