"""A fingerprint belongs to the bits of a tensor and its name, not to how it is sharded."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kempner.training.compute import fingerprint as prints
from kempner.training.compute.fingerprint import (
    StateFingerprint,
    TableFingerprint,
    fingerprint,
    text_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)  # fmt: skip
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor of random bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    content = torch.randint(0, 256, (math.prod(shape) * size,), generator=generator)
    return content.to(torch.uint8).view(dtype).view(shape)


SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_flipped_bit_changes_it(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = drawn(shape, dtype)
    bits = whole.clone().view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, len(bits) - 1))
    bits[place] ^= 1 if dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    assert fingerprint(bits.view(dtype).view(shape)) != fingerprint(whole)


@given(data=st.data(), shape=SHAPES.filter(len), dtype=st.sampled_from(DTYPES))
def test_the_parts_of_any_cuts_add_up(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = drawn(shape, dtype)
    parts = [((0,) * len(shape), whole)]
    for dimension in data.draw(st.lists(st.integers(0, len(shape) - 1), max_size=3)):
        at = data.draw(st.integers(0, shape[dimension]))
        cut = []
        for offsets, part in parts:
            here = min(max(0, at - offsets[dimension]), part.shape[dimension])
            rest = part.shape[dimension] - here
            later = (*offsets[:dimension], offsets[dimension] + here, *offsets[dimension + 1 :])
            cut += [
                (offsets, part.narrow(dimension, 0, here)),
                (later, part.narrow(dimension, here, rest)),
            ]
        parts = cut
    added = torch.stack([fingerprint(part, offsets) for offsets, part in parts]).sum()
    assert added == fingerprint(whole)


def test_a_large_tensor_is_the_sum_of_its_slabs() -> None:
    whole = drawn((1000, 300), torch.float32)
    by_definition = 0
    rows, columns = (
        prints._keys(n, 0, s, whole.device).tolist() for n, s in enumerate((1000, 300))
    )
    for row, bits in zip(rows, whole.view(torch.int32).tolist(), strict=True):
        by_definition += row * sum(b * c for b, c in zip(bits, columns, strict=True))
    word = prints._keys(-1, 0, 1, whole.device).item()
    assert text_of(int(fingerprint(whole))) == text_of(by_definition * word)


def test_it_belongs_to_a_place_and_a_name() -> None:
    one = drawn((4, 3), torch.float32)
    known = {
        int(fingerprint(each))
        for each in (one, one.flip(0), one.flip(1), one.roll(1, 0), one.reshape(3, 4), -one)
    }
    assert len(known) == 6
    named = TableFingerprint({"model.a": one, "model.b": one}, 0, 1).local()
    assert named[0] != named[1]


@given(world=st.integers(1, 6), seed=st.integers(0, 9))
def test_what_every_rank_has_counts_once(world: int, seed: int) -> None:
    table = {f"model.{n}": drawn((9, n + 40), torch.float32, seed) for n in range(4)}
    table["optimizer.a.step"] = torch.tensor(3.0)
    table |= {"model.large": drawn((90, 80), torch.bfloat16, seed), "model.none": torch.empty(0, 3)}
    table["model.turned"] = drawn((5, 6), torch.float64, seed).T
    parts = [TableFingerprint(table, rank, world).local() for rank in range(world)]
    assert torch.equal(torch.stack(parts).sum(0), TableFingerprint(table, 0, 1).local())


def test_it_follows_what_happens_in_memory() -> None:
    table = {"model.a": drawn((9, 5), torch.int32), "model.large": drawn((70, 80), torch.int32)}
    table |= {f"{name}.turned": tensor.T for name, tensor in table.items()}
    prints_of = TableFingerprint(table, 0, 1)
    before = prints_of.local()
    for name, tensor in table.items():
        tensor[2, 3] ^= 1 << 30
        here = prints_of.local()
        assert torch.equal(here, TableFingerprint(table, 0, 1).local())
        changed = [one for one, same in zip(table, here == before, strict=True) if not same]
        assert changed == [one for one in table if one.split(".")[:2] == name.split(".")[:2]]
        tensor[2, 3] ^= 1 << 30


def test_names_of_state_are_those_of_a_checkpoint() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = StateFingerprint(model, optimizer, 0, 1)
    assert len(state.local()) == len(state.names) == 2
    model(torch.ones(3)).sum().backward()
    optimizer.step()  # its state is there from now on
    first = state.local()
    assert "optimizer.weight.exp_avg_sq" in state.names
    assert len(first) == len(state.names) == 8
    with torch.no_grad():
        model.bias[1] += 1
    changed = (state.local() != first).tolist()
    assert [name for name, differs in zip(state.names, changed, strict=True) if differs] == [
        "model.bias"
    ]
