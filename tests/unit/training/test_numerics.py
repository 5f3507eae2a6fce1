"""What `kempner replay --trace` records of a step is what the step computes, and changes no bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kempner.cluster.world import World
from kempner.config.sections import Config, ProfilingSection
from kempner.config.site import DistributedSection
from kempner.data.order.shuffle import SampleOrder
from kempner.data.serve.loader import MicroBatch, StepBatch
from kempner.model.sharding import build_model, compile_blocks
from kempner.run.record.ledger import read_lines
from kempner.training.compute.fingerprint import fingerprint, text_of
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.observe.numerics import Figures, Numerics, lines_of_step

CPU, VOCAB, ORDER = torch.device("cpu"), 31, SampleOrder(9, 1)
SIZES = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "dropout": 0.2}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield adopt(World(0, 1, 0, 1, "none"), CPU, DistributedSection(timeout=60.0))
    dist.destroy_process_group()


def micro_batches(step: int) -> list[MicroBatch]:
    tokens = torch.randint(0, VOCAB, (2, 2, 9), generator=torch.Generator().manual_seed(step))
    return [MicroBatch(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def train(ranks: Ranks, file: Path | None, **changed: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Weights after two steps of four samples each, and the loss of the last one."""
    asked = Config.model_validate({"model": SIZES, "train": changed})
    model = build_model(asked, VOCAB, CPU, None)
    if asked.train.compile:
        compile_blocks(model)
    optimizer, gradient = build_optimizer(model, asked.optimizer), StepGradient(model, CPU, 3, 0)
    section = ProfilingSection(numerics=str(file), numerics_from=2)
    numerics = None if file is None else Numerics(section, model, ranks, micro_steps=2, step=0)
    for step in (1, 2):
        micro = micro_batches(step)
        gradient.add(micro[:1], step)  # a step that is called off
        optimizer.zero_grad()
        loss = gradient.add(micro, step)
        if numerics is not None:
            numerics.before_update()
        norm = update(model, optimizer, loss, 1e-2, 0.5)
        if numerics is not None:
            batch = StepBatch(micro, [*range(4 * step, 4 * step + 4)], 0)
            numerics.after_update(step, batch, ORDER, {"loss": loss, "grad_norm": norm})
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, loss


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_a_record_is_what_the_step_computed(again: str, tmp_path: Path, ranks: Ranks) -> None:
    plain, loss = train(ranks, None)
    traced, _ = train(ranks, tmp_path / "trace", activation_checkpointing=again)
    assert all(torch.equal(plain[name], traced[name]) for name in plain)
    head, *lines = read_lines(tmp_path / "trace")
    assert (head["kind"], head["step"], head["loss"]) == ("step", 2, loss.item())
    assert len(lines) == head["lines"]
    batches = [line for line in lines if line["kind"] == "batch"]
    assert [line["positions"] for line in batches] == [[8, 9], [10, 11]]
    assert batches[0]["samples"] == [ORDER.locate(8)[1], ORDER.locate(9)[1]]

    seen = {
        kind: [line["module"] for line in lines if line["kind"] == kind and not line["micro_batch"]]
        for kind in ("output", "gradient")
    }
    assert sorted(seen["output"]) == sorted(seen["gradient"]), "what is computed again counts once"
    order = ["embed", "layers.0.attention.wq", "layers.0.ffn", "layers.0", "layers.1", "model"]
    for kind, expected in (("output", order), ("gradient", order[::-1])):
        places = [seen[kind].index(name) for name in expected if name != "layers.0.ffn"]
        assert all(one < following for one, following in pairwise(places)), kind
    losses = [line["norm"] for line in lines if line.get("module") == "model"][::2]
    assert sum(losses) / 32 == pytest.approx(loss.item(), rel=1e-6)

    for line in lines:
        if line["kind"] == "parameter":
            weight = traced[line["parameter"]]
            assert line["weight"]["fingerprint"] == text_of(int(fingerprint(weight)))
            assert line["weight"]["norm"] == pytest.approx(weight.norm().item())
            assert 0 < line["update"]["max"] < 0.011


def test_records_do_not_depend_on_what_is_computed_again(tmp_path: Path, ranks: Ranks) -> None:
    found = []
    for again in ("none", "full"):
        train(ranks, tmp_path / again, activation_checkpointing=again)
        lines = list(read_lines(tmp_path / again))[1:]
        # Inside a feed-forward that is computed again the products are modules' outputs, too.
        found.append([line for line in lines if ".ffn.w" not in str(line.get("module"))])
    assert found[0] == found[1]


@given(st.lists(st.integers(-9, 9), min_size=4, max_size=12), st.integers(1, 3))
def test_shards_make_the_figures_of_the_whole(numbers: list[int], cut: int) -> None:
    def figures(part: list[int]) -> Figures:
        return Figures(sum(n * n for n in part), max(map(abs, part)), sum(part) * 2**61)

    micros = [([at], [{"kind": "batch", "at": at}]) for at in (4, 0, 2)]
    own = [(name, {"weight": figures(part)}) for name, part in
           (("b", numbers[:cut]), ("a", numbers), ("b", numbers[cut:]))]  # fmt: skip
    *batches, a, b = lines_of_step(micros, own, ["a", "frozen", "b"])
    assert [(line["micro_batch"], line["at"]) for line in batches] == [(0, 0), (1, 2), (2, 4)]
    assert (a["parameter"], b["parameter"]) == ("a", "b")
    assert a["weight"] == b["weight"]
    assert a["weight"]["norm"] == pytest.approx(math.hypot(*numbers))


def test_blocks_that_are_compiled_are_seen_from_outside(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    plain, _ = train(ranks, None, compile=True)
    traced, _ = train(ranks, tmp_path / "trace", compile=True)
    assert all(torch.equal(plain[name], traced[name]) for name in plain)
    modules = {line.get("module") for line in read_lines(tmp_path / "trace")}
    assert {"layers.0", "layers.1", "embed"} <= modules
    assert "layers.0.attention" not in modules
