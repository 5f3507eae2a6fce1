"""The mesh of a world: what is left, what is refused and why, and who takes which samples."""

from __future__ import annotations

import pytest

from kempner.config.model import ParallelismSection
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.order.batch_slices import Slicing
from kempner.model.spec.mesh import (
    MeshDegrees,
    check_tensor_degree,
    check_tensor_groups,
    resolve_degrees,
)
from kempner.run.process.exit_codes import UsageError


def section(replicate: int = 1, shard: int = -1, tensor: int = 1) -> ParallelismSection:
    return ParallelismSection(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tensor,
    )


@pytest.mark.parametrize(
    ("asked", "world", "degrees"),
    [
        ((), 1, (1, 1, 1)),
        ((), 8, (1, 8, 1)),
        ((2,), 8, (2, 4, 1)),
        ((-1, 4), 8, (2, 4, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((-1, 1, 4), 8, (2, 1, 4)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((1, -1, 8), 8, (1, 1, 8)),
    ],
)
def test_what_is_left_open_is_what_is_left(
    asked: tuple[int, ...], world: int, degrees: tuple[int, int, int]
) -> None:
    found = resolve_degrees(section(*asked), world)
    assert found == MeshDegrees(*degrees)
    assert found.world == world


@pytest.mark.parametrize(
    ("asked", "world", "arithmetic"),
    [
        ((1, -1, 3), 8, "tensor_parallel_degree=3 = 3 does not divide the 8 ranks"),
        ((1, -1, 16), 8, "16 does not divide the 8 ranks"),
        ((4, -1, 4), 8, "data_parallel_replicate_degree=4 x tensor_parallel_degree=4 = 16 does"),
        ((2, 2, 1), 8, "= 4 ranks, but there are 8"),
        ((1, 16, 1), 8, "= 16 ranks, but there are 8"),
    ],
)
def test_an_impossible_product_is_refused_with_the_arithmetic(
    asked: tuple[int, ...], world: int, arithmetic: str
) -> None:
    with pytest.raises(UsageError, match=r"^parallelism: ") as refusal:
        resolve_degrees(section(*asked), world)
    assert arithmetic in str(refusal.value)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"data_parallel_replicate_degree": -1, "data_parallel_shard_degree": -1},
            "only one of",
        ),
        ({"data_parallel_shard_degree": 0}, "leaves no ranks"),
        ({"tensor_parallel_degree": -1}, "tensor_parallel_degree"),
    ],
)
def test_degrees_that_make_no_sense_are_refused(table: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ParallelismSection.model_validate(table)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"n_kv_heads": 2}, "does not divide model.n_kv_heads=2 (2 / 4 = 0.50)"),
        ({"n_heads": 6, "dim": 48, "n_kv_heads": 6}, "does not divide model.n_kv_heads=6"),
        ({"ffn_dim": 102}, "does not divide model.ffn_dim=102"),
        ({"vocab_multiple": 1}, "does not divide the rows of the vocabulary=257"),
        ({}, "does not divide train.seq_len=30"),
    ],
)
def test_a_tensor_degree_divides_all_that_it_cuts(model: dict[str, int], sentence: str) -> None:
    sizes = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 64, "vocab_multiple": 4, **model}
    config = Config(
        model=ModelSection.model_validate(sizes),
        train=TrainSection(seq_len=30),
        parallelism=section(tensor=4),
    )
    with pytest.raises(UsageError) as refusal:
        check_tensor_degree(config, 257)
    assert sentence in str(refusal.value)
    check_tensor_degree(config.model_copy(update={"parallelism": section()}), 257)


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"factory": "a:b"}},
        {"optimizer": {"name": "muon"}},
        {"train": {"fp8": True, "compile": True}},
    ],
)
def test_what_cannot_be_tensor_parallel_is_refused_at_once(other: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"parallelism.tensor_parallel_degree=2 .*; set it to 1,"):
        Config.model_validate({**other, "parallelism": {"tensor_parallel_degree": 2}})


@pytest.mark.parametrize(
    ("hosts", "degree", "refused"),
    [
        ("aabb", 2, ""),
        ("aaaa", 4, ""),
        ("aaab", 2, "the ranks 2 to 3 on a and b"),
        ("abab", 2, "the ranks 0 to 1 on a and b"),  # dealt out in turns
        ("aabb", 4, "the ranks 0 to 3 on a and b"),
    ],
)
def test_a_tensor_group_is_on_one_node(hosts: str, degree: int, refused: str) -> None:
    if not refused:
        check_tensor_groups(hosts, degree)
        return
    with pytest.raises(UsageError, match=refused):
        check_tensor_groups(hosts, degree)


@pytest.mark.parametrize("batch", [1, 7, 12])
def test_each_sample_of_a_step_goes_to_one_tensor_group(batch: int) -> None:
    """Whatever the mesh: a position in the endless order is all that a resume needs."""
    for world in (1, 2, 4, 6, 8):
        for tensor in (t for t in (1, 2, 4) if world % t == 0):
            for replicate in (r for r in (1, 2) if world // tensor % r == 0):
                degrees = resolve_degrees(section(replicate, -1, tensor), world)
                groups: dict[int, list[list[int]]] = {}
                for rank in range(world):
                    data_rank = degrees.data_rank(rank)
                    slicing = Slicing(batch, 2, data_rank, degrees.data_world)
                    groups.setdefault(rank // tensor, []).append(slicing.positions(100))
                assert all(taken == [taken[0]] * tensor for taken in groups.values())
                together = [position for taken in groups.values() for position in taken[0]]
                assert together == list(range(100, 100 + batch))
