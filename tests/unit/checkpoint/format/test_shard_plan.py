"""Planning without asking: every element of every tensor is written by exactly one rank."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kempner.checkpoint.format.contents import overlap
from kempner.checkpoint.format.shard_plan import (
    ALIGNMENT,
    SMALL,
    TensorSpec,
    chunk_of,
    coordinate,
    digest,
    file_length,
    holders,
    list_all,
    listed,
    piece_sizes,
    place,
)
from kempner.checkpoint.tensors.file_buffer import Container

MESHES = [(1,), (2,), (3,), (8,), (2, 2), (2, 3), (3, 1, 2)]
SHAPES = [(), (1,), (5,), (8, 3), (3, 8), (2, 3, 4), (0,), (4, 0)]


def all_specs(mesh: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[TensorSpec]:
    """A tensor cut along each dimension of the mesh in every way, in every order."""
    for placements in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
        for order in ((), *itertools.permutations(range(len(mesh)))):
            yield TensorSpec("w", shape, "float32", mesh, placements, order)


def container(dtype: str, sizes: tuple[int, ...]) -> Container:
    width = {"float32": 4, "int64": 8}[dtype]
    return Container(b"<" * 64, math.prod(sizes) * width, b">" * 7)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_all_ranks_cover_each_element_once(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    for spec in all_specs(mesh, shape):
        times = np.zeros(shape, int)
        chunks = [chunk_of(spec, rank) for rank in range(math.prod(mesh))]
        for chunk in filter(None, chunks):
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert times[where].shape == chunk.sizes
            times[where] += 1
        assert (times == 1).all()
        assert any(chunks), "even an empty tensor is written once"


@pytest.mark.parametrize("mesh", MESHES)
def test_coordinates_are_row_major(mesh: tuple[int, ...]) -> None:
    ranks = range(math.prod(mesh))
    assert [coordinate(rank, mesh) for rank in ranks] == list(np.ndindex(*mesh))


def test_what_all_hold_is_spread_over_the_ranks_unless_it_is_small() -> None:
    for elements, fewest in ((SMALL + 1, [50] * 8), (SMALL, [800, *[0] * 7])):
        specs = [TensorSpec(f"w.{n}", (elements,), "float32", (8,), (None,)) for n in range(800)]
        written = [len(place(specs, rank, container)) for rank in range(8)]
        assert sum(written) == 800
        assert all(count >= least for count, least in zip(written, fewest, strict=True))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2)])
def test_the_holders_of_a_box_are_those_that_asking_everybody_finds(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    rng = random.Random(0)
    for spec in all_specs(mesh, shape):
        low = tuple(rng.randint(0, max(0, size - 1)) for size in shape)
        sizes = tuple(
            rng.randint(1, size - at) if size else 0 for at, size in zip(low, shape, strict=True)
        )
        for offsets, extent in ((low, sizes), ((0,) * len(shape), shape)):
            found = list(holders(spec, offsets, extent))
            chunks = {rank: chunk_of(spec, rank) for rank in range(math.prod(mesh))}
            expected = [
                rank
                for rank, chunk in chunks.items()
                if chunk is not None and overlap(offsets, extent, chunk.offsets, chunk.sizes)
            ]
            assert sorted(rank for rank in found if rank in expected) == expected
            if 0 not in extent:
                assert sorted(found) == expected


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2)])
def test_the_sizes_of_all_pieces_are_known_without_asking_every_rank(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    for spec in all_specs(mesh, shape):
        chunks = (chunk_of(spec, rank) for rank in range(math.prod(mesh)))
        assert piece_sizes(spec) == {chunk.sizes for chunk in chunks if chunk is not None}


def test_a_file_holds_the_small_first_aligned_and_without_overlap() -> None:
    specs = [
        TensorSpec("big", (1000, 10), "float32", (2,), (0,)),
        TensorSpec("b", (), "float32", (2,), (None,)),
        TensorSpec("a", (7,), "int64", (2,), (None,)),
        TensorSpec("bias", (9,), "float32", (2,), (0,)),
    ]
    for rank in range(2):
        placed = place(specs, rank, container)
        sizes = [item.container.data for item in placed]
        assert sizes == sorted(sizes)
        assert placed[-1].chunk.key == "big"
        for item, following in itertools.pairwise(placed):
            assert item.start + item.container.length <= following.start
            assert following.start % ALIGNMENT == 0
        assert file_length(placed) == placed[-1].start + placed[-1].container.length


@pytest.mark.parametrize("mesh", MESHES)
def test_the_list_of_all_files_is_what_each_rank_places(mesh: tuple[int, ...]) -> None:
    specs = [
        TensorSpec(f"{shape}{placements}{dtype}{twin}", shape, dtype, mesh, placements)
        for shape in [*SHAPES, (SMALL + 3, 2)]
        for placements in itertools.product([None, *range(len(shape))], repeat=len(mesh))
        for dtype in ("float32", "int64")
        for twin in range(2)
    ]
    world = math.prod(mesh)
    expected = [listed(place(specs, rank, container)) for rank in range(world)]
    assert list(list_all(specs, world, container)) == expected


def test_fsdp_cuts_what_tensor_parallelism_has_cut_before() -> None:
    """Rank 2 s + t of a mesh of 2 x 2 has the half s of the rows that tensor rank t has."""
    spec = TensorSpec("w", (10, 3), "float32", (2, 2), (0, 0), order=(1, 0))
    rows = [
        (chunk.offsets[0], chunk.sizes[0])
        for rank in range(4)
        if (chunk := chunk_of(spec, rank)) is not None
    ]
    assert rows == [(0, 3), (5, 3), (3, 2), (8, 2)]


def test_plans_that_differ_have_different_digests() -> None:
    spec = TensorSpec("w", (4, 4), "float32", (2,), (0,))
    others = [
        TensorSpec("v", (4, 4), "float32", (2,), (0,)),
        TensorSpec("w", (4, 5), "float32", (2,), (0,)),
        TensorSpec("w", (4, 4), "int64", (2,), (0,)),
        TensorSpec("w", (4, 4), "float32", (4,), (0,)),
        TensorSpec("w", (4, 4), "float32", (2,), (1,)),
    ]
    assert len({digest([other]) for other in [spec, *others]}) == 6
    assert all(0 <= digest([other]) < 2**63 for other in others)
