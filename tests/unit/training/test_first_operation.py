"""`kempner compare` names the operation in which a planted difference first shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kempner.cli.entry import main
from kempner.cluster.world import World
from kempner.config.sections import Config, ProfilingSection
from kempner.config.site import DistributedSection
from kempner.data.order.shuffle import SampleOrder
from kempner.data.serve.loader import MicroBatch, StepBatch
from kempner.insight.compare import (
    BACKWARD,
    CLIPPING,
    FORWARD,
    GRADIENT,
    RATE,
    SAMPLES,
    UPDATE,
    first_operation,
    first_parameter,
)
from kempner.insight.replay import traced_steps
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.observe.numerics import Numerics

CPU, VOCAB = torch.device("cpu"), 31
SIZES = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "dropout": 0.2}

Plant = Callable[[Transformer, Optimizer], object]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield adopt(World(0, 1, 0, 1, "none"), CPU, DistributedSection(timeout=60.0))
    dist.destroy_process_group()


def nothing(model: Transformer, optimizer: Optimizer) -> None:
    pass


@dataclass(frozen=True)
class Planted:
    """What is different in the second step of a run: `before` it, or `between` the backward and the
    update; and what is first to show that. Without it the step has the values that are here."""

    operation: str
    name: str = ""
    before: Plant = nothing
    between: Plant = nothing
    seed: int = 3
    data: int = 1
    rate: float = 1e-2
    clip: float = 0.5


def traced(ranks: Ranks, file: Path, planted: Planted) -> None:
    """A trace of the second step."""
    asked = Config.model_validate({"model": SIZES})
    model = build_model(asked, VOCAB, CPU, None)
    optimizer = build_optimizer(model, asked.optimizer)
    numerics = Numerics(ProfilingSection(numerics=str(file), numerics_from=2), model, ranks, 2, 0)
    for step, now in ((1, Planted("")), (2, planted)):
        now.before(model, optimizer)
        generator = torch.Generator().manual_seed(step + now.data)
        tokens = torch.randint(0, VOCAB, (2, 2, 9), generator=generator)
        micro = [MicroBatch(rows[:, :-1], rows[:, 1:]) for rows in tokens]
        loss = StepGradient(model, CPU, now.seed, 0).add(micro, step)
        now.between(model, optimizer)
        numerics.before_update()
        norm = update(model, optimizer, loss, now.rate, now.clip)
        batch = StepBatch(micro, [*range(4 * step, 4 * step + 4)], 0)
        numbers = {"loss": loss, "grad_norm": norm, "lr": now.rate}
        numerics.after_update(step, batch, SampleOrder(9, now.data), numbers)


def flipped(tensor: Tensor) -> None:
    """A bit of the first element of each row."""
    tensor.detach().view(torch.int32)[..., 0] ^= 1 << 12


def weight(name: str) -> Plant:
    return lambda model, _: flipped(model.get_parameter(name))


def gradient(name: str) -> Plant:
    return lambda model, _: flipped(model.get_parameter(name).grad)  # type: ignore[arg-type]


def moment(name: str, entry: str) -> Plant:
    return lambda model, optimizer: flipped(optimizer.state[model.get_parameter(name)][entry])


def rotary(model: Transformer, _: Optimizer) -> None:
    model.rotary[1:] += 2**-10


def output(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Transformer, _: Optimizer) -> None:
        module = model.get_submodule(name) if name else model
        module.register_forward_hook(lambda *seen: change(seen[2]), prepend=True)

    return plant


def dropped(model: Transformer, _: Optimizer) -> None:
    model.get_submodule("layers.1.dropout").p = 0.3  # type: ignore[assignment]


def hyperparameter(name: str, value: object) -> Plant:
    return lambda _, optimizer: [group.update({name: value}) for group in optimizer.param_groups]


class Twisted(torch.autograd.Function):
    """Right in the forward, wrong in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + 2**-8)


PLANTED = {
    "data order": Planted(SAMPLES, data=2),
    "embedding": Planted(FORWARD, "embed", weight("embed.weight")),
    "norm before attention": Planted(
        FORWARD, "layers.0.attention_norm", weight("layers.0.attention_norm.weight")
    ),
    **{
        name: Planted(
            FORWARD, f"layers.1.attention.{name}", weight(f"layers.1.attention.{name}.weight")
        )
        for name in ("wq", "wk", "wv", "wo")
    },
    "rope": Planted(FORWARD, "layers.0.attention.wo", rotary),
    "attention": Planted(
        FORWARD, "layers.1.attention", output("layers.1.attention", lambda x: x * (1 + 2**-9))
    ),
    "norm before MLP": Planted(FORWARD, "layers.1.ffn_norm", weight("layers.1.ffn_norm.weight")),
    **{
        f"MLP {name}": Planted(FORWARD, "layers.0.ffn", weight(f"layers.0.ffn.{name}.weight"))
        for name in ("w1", "w2", "w3")
    },
    "dropout": Planted(FORWARD, "layers.1.dropout", dropped),
    "seed of dropout": Planted(FORWARD, "layers.0.dropout", seed=4),
    "last norm": Planted(FORWARD, "norm", weight("norm.weight")),
    "output projection": Planted(FORWARD, "model", weight("output.weight")),
    "loss": Planted(FORWARD, "model", output("", lambda loss: loss * 1.5)),
    "backward": Planted(BACKWARD, "layers.1.ffn_norm", output("layers.1.ffn", Twisted.apply)),
    "sum of gradients": Planted(
        GRADIENT, "layers.1.ffn.w2.weight", between=gradient("layers.1.ffn.w2.weight")
    ),
    "learning rate": Planted(RATE, rate=2e-2),
    "clipping": Planted(CLIPPING, "embed.weight", clip=0.25),
    "first moment": Planted(UPDATE, "norm.weight", moment("norm.weight", "exp_avg")),
    "second moment": Planted(UPDATE, "output.weight", moment("output.weight", "exp_avg_sq")),
    "betas": Planted(UPDATE, "embed.weight", hyperparameter("betas", (0.8, 0.95))),
    "weight decay": Planted(UPDATE, "embed.weight", hyperparameter("weight_decay", 0.3)),
}


def test_the_first_operation_is_named(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = Planted("")
    for name in ("as it is", "again"):
        traced(ranks, tmp_path / name, usual)
    assert compared(tmp_path / "as it is", tmp_path / "again") == 0
    assert "1 step: equal to the bit" in capsys.readouterr().out
    before = traced_steps(tmp_path / "as it is")[2]
    missed = []
    for name, planted in PLANTED.items():
        traced(ranks, tmp_path / name, planted)
        after = traced_steps(tmp_path / name)[2]
        found = first_operation(before, after, (usual.clip, planted.clip))
        place = None if found is None else found.place[:2]
        if place != (planted.operation, planted.name):
            missed.append(f"{name}: {found}")
        parameter = first_parameter(before, after)
        assert parameter is not None
        if planted.operation in (GRADIENT, UPDATE):
            kind = "gradient" if planted.operation == GRADIENT else "update"
            assert f"the {kind} of {planted.name} differs, the first of" in parameter
        assert compared(tmp_path / "as it is", tmp_path / name) == 1
        assert planted.name in capsys.readouterr().out
    assert not missed, missed
    assert len(PLANTED) >= 20


def compared(a: Path, b: Path) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(a), str(b)])
    return ended.value.code


def test_what_only_one_run_computes_is_named() -> None:
    step = {"kind": "step", "loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    figures = {"kind": "output", "micro_batch": 0, "norm": 1.0, "fingerprint": "0"}
    a, b, c = ({**figures, "module": name} for name in "abc")
    for one, other, who in (([a, b, c], [a, c], "B"), ([a, c], [a, b, c], "A")):
        found = first_operation([step, *one], [step, *other])
        assert found is not None
        assert (found.place.name, found.before and found.before.name) == ("b", "a")
        assert f"not computed in {who}" in found.sentence
