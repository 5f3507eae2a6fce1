"""The differences between two checkpoints of any kinds, for `kempner compare`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.checkpoint.store.retention import locate, pick, reading_at
from kempner.cli.checkpoint import inspect
from kempner.cli.checkpoint.hugging_face import has_weights, matching_names, needless
from kempner.cli.progress import busy, counter
from kempner.cluster.machine import raise_open_file_limit
from kempner.run.process.exit_codes import ExitCode

if TYPE_CHECKING:
    from kempner.checkpoint.compare import Pair, Side


def compare_checkpoints(a: Path, b: Path, model_only: bool, as_json: bool) -> ExitCode:
    """Compare tensor by tensor, and print what differs, and a summary; or all of it as JSON.

    `a` and `b` are each a run or its checkpoint folder (its `latest`), one checkpoint, a folder of
    torch.distributed.checkpoint, or a folder with safetensors. Raises `RunError`.
    """
    raise_open_file_limit()
    with _open(a) as one, _open(b) as other:
        from kempner.checkpoint.compare import bytes_to_read, pairs

        one, other = _matched(one, other, model_only)
        found = []
        with counter("comparing", bytes_to_read(one, other)) as on_bytes:
            for pair in pairs(one, other, on_bytes):
                found.append(pair)
                if not as_json and not pair.equal:
                    typer.echo(_line(pair))
    equal = all(pair.equal for pair in found)
    typer.echo(_as_json(one, other, found) if as_json else _summary(found))
    return ExitCode.COMPLETED if equal else ExitCode.CRASHED


@contextmanager
def _open(path: Path) -> Iterator[Side]:
    with busy("importing torch"):
        from kempner.checkpoint import compare

    if has_weights(path):
        yield compare.open_safetensors(path)
    elif (path / METADATA).is_file() and not (path / MANIFEST).is_file():
        yield compare.open_dcp(path)
    else:
        checkpoint = pick(*locate(path), None)
        with reading_at(checkpoint, inspect.warn_unmarked):
            yield compare.open_kempner(checkpoint)


def _matched(a: Side, b: Side, model_only: bool) -> tuple[Side, Side]:
    """Both sides, reduced to the tensors and renamed to the names that the other side can have."""
    from kempner.checkpoint.compare import SAFETENSORS, model_of, renamed, without

    if a.kind == b.kind == SAFETENSORS:
        return a, b
    if a.kind == SAFETENSORS:
        b, a = _matched(b, a, model_only)
    elif b.kind == SAFETENSORS:
        a = model_of(a)
        extra, names = needless(b.path, b.tensors), matching_names(b.tensors, a.tensors)
        b = renamed(without(b, extra - names.keys()), names)
    elif model_only:
        a, b = model_of(a), model_of(b)
    return a, b


def _line(pair: Pair) -> str:
    if pair.a is None or pair.b is None:
        return f"{pair.name}: {pair.verdict}"
    if pair.difference is None:
        a, b = (f"{side.dtype} {list(side.shape)}" for side in (pair.a, pair.b))
        return f"{pair.name}: {a} in A, {b} in B"
    found = pair.difference
    dtypes = pair.a.dtype if pair.a.dtype == pair.b.dtype else f"{pair.a.dtype} and {pair.b.dtype}"
    details = [f"{found.different:,} of {found.elements:,} elements ({dtypes})"]
    if found.not_finite < found.different:
        details.append(f"at most {found.max_abs:.3g} apart, relatively {found.max_rel:.3g}")
    if found.not_finite:
        details.append(f"{found.not_finite:,} of them not finite in A or B")
    return f"{pair.name}: {', '.join(details)}; the first at {list(found.first or ())}"


def _summary(found: Sequence[Pair]) -> str:
    identical = sum(pair.verdict == "identical" for pair in found)
    different = sum(not pair.equal for pair in found)
    if identical == len(found):
        return f"equal to the bit: {len(found):,} tensors"
    parts = [f"{identical:,} equal to the bit"] * bool(identical)
    rounded = [pair.difference for pair in found if pair.verdict == "equal" and pair.difference]
    for dtype, count in Counter(difference.compared_in for difference in rounded).items():
        lost = sum(d.rounded for d in rounded if d.compared_in == dtype)
        changed = f"{lost:,} elements" if lost else "none"
        parts.append(f"{count:,} equal after rounding to {dtype}, which changed {changed}")
    if different:
        parts.insert(0, f"{different:,} of {len(found):,} tensors")
    return f"{'different' if different else 'equal'}: {'; '.join(parts)}"


def _as_json(a: Side, b: Side, found: Sequence[Pair]) -> str:
    table: dict[str, Any] = {
        "a": {"path": str(a.path), "kind": a.kind},
        "b": {"path": str(b.path), "kind": b.kind},
        "equal": all(pair.equal for pair in found),
        "identical": all(pair.verdict == "identical" for pair in found),
        "tensors": [pair.to_json() for pair in found],
    }
    return json.dumps(table, indent=2)
