"""A checkpoint of another mesh of the same world is used, with a remark."""

from __future__ import annotations

import pytest

from kempner.checkpoint.format.manifest import Identity
from kempner.checkpoint.store.selection import compare_identities


@pytest.mark.parametrize(
    ("saved", "now", "remark"),
    [
        ({"fsdp": 4}, {"shard": 4}, ""),  # as checkpoints have called it before
        ({}, {"shard": 4}, ""),  # an imported one
        ({"shard": 4}, {"replicate": 4, "shard": 1}, "a mesh of shard 4, now it is replicate 4:"),
        ({"shard": 2, "tensor": 2}, {"shard": 4}, "shard 2 x tensor 2, now it is shard 4:"),
    ],
)
def test_another_mesh_is_remarked(saved: dict[str, int], now: dict[str, int], remark: str) -> None:
    before, after = (Identity(4, mesh, 0, "data", {}) for mesh in (saved, now))
    judgement = compare_identities(before, after, [])
    assert not judgement.refusals
    assert bool(judgement.remarks) == bool(remark)
    assert remark in "".join(judgement.remarks)
