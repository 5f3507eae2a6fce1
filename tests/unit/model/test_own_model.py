"""A model of the user's own: what kempner makes of it, and what it refuses in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.factory import create, digest, place
from kempner.model.spec.shape import model_record
from kempner.run.process.exit_codes import UsageError

VOCAB = 31
CPU = torch.device("cpu")

MODULE = """
import random
import numpy as np
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, vocab_size)
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)

def plain(options, vocab_size):
    return Plain(vocab_size, options.get("width", 8))

def dice(options, vocab_size):
    model = plain(options, vocab_size)
    with torch.no_grad():
        model.head.bias += random.random() + torch.from_numpy(np.random.rand(vocab_size))
    return model

def changed(change):
    def build(options, vocab_size):
        model = plain(options, vocab_size)
        return change(model) or model
    return build

half = changed(lambda model: model.bfloat16())
elsewhere = changed(lambda model: model.to("meta"))
statistics = changed(lambda model: model.add_module("norm", nn.BatchNorm1d(3)))
scalar = changed(lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(()))))
shared = changed(lambda model: setattr(model.layers[1], "weight", model.layers[0].weight))
tied = changed(lambda model: setattr(model.head, "weight", model.embed.weight))
empty = lambda options, vocab_size: nn.Identity()
narrow = lambda options, vocab_size: plain(options, vocab_size - 1)
a_string = lambda options, vocab_size: "a model"
class within:
    plain = plain
text = "no function"
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules in the working directory."""
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(MODULE)
    (package / "lacking.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "ours"]:
        del sys.modules[name]


def asking(factory: str, seed: int = 3, **options: object) -> Config:
    section = ModelSection(factory=factory, options=options)
    return Config(model=section, train=TrainSection(seed=seed, seq_len=5))


@pytest.mark.parametrize("factory", ["ours.models:plain", "ours.models:within.plain"])
def test_the_weights_follow_from_seed_and_options_alone(factory: str) -> None:
    first = digest(create(asking(factory), VOCAB))
    state = torch.random.get_rng_state()
    torch.rand(7)
    assert digest(create(asking(factory), VOCAB)) == first
    assert digest(create(asking(factory, seed=4), VOCAB)) != first
    assert digest(create(asking(factory, width=9), VOCAB)) != first
    torch.random.set_rng_state(state)
    after = torch.rand(3)
    torch.random.set_rng_state(state)
    create(asking(factory), VOCAB)
    assert torch.equal(torch.rand(3), after)  # the global generator is as it was


def test_every_usual_source_of_numbers_is_seeded() -> None:
    asked = asking("ours.models:dice")
    assert digest(create(asked, VOCAB)) == digest(create(asked, VOCAB))


@pytest.mark.parametrize("factory", ["plain", "tied"])
def test_it_computes_in_the_runs_type(factory: str) -> None:
    asked = asking(f"ours.models:{factory}")
    rough = asked.model_copy(update={"train": TrainSection(seed=3, seq_len=5, dtype="bfloat16")})
    tokens = torch.arange(10).view(2, 5)
    exact, in_bfloat16 = (
        place(create(config, VOCAB), config, VOCAB, CPU, None)(tokens).float()
        for config in (asked, rough)
    )
    assert exact.shape == (2, 5, VOCAB)
    assert not torch.equal(exact, in_bfloat16)
    torch.testing.assert_close(exact, in_bfloat16, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("nowhere:build", "there is no module nowhere in the working directory"),
        ("ours.nowhere:build", "there is no module ours.nowhere"),
        ("ours.models:nothing", "the module ours.models has no nothing"),
        ("ours.models:plain.more", "the module ours.models has no plain.more"),
        ("ours.models:text", "is a str; it must be a function"),
        ("ours.models:a_string", "returned a str; it must return a torch module"),
        ("ours.models:empty", "it has no parameters"),
        ("ours.models:half", "embed.weight is torch.bfloat16 on cpu"),
        ("ours.models:elsewhere", "embed.weight is torch.float32 on meta"),
        ("ours.models:statistics", "its buffer norm.running_mean is part of its state_dict"),
        ("ours.models:scalar", "scale has no dimension to shard"),
        ("ours.models:shared", "layers.0.weight and layers.1.weight are one parameter"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(factory: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        create(asking(factory), VOCAB)
    assert str(refused.value).startswith(f"model.factory={factory}")
    assert sentence in str(refused.value)


def test_logits_of_another_shape_are_refused() -> None:
    asked = asking("ours.models:narrow")
    model = place(create(asked, VOCAB), asked, VOCAB, CPU, None)
    with pytest.raises(UsageError, match=r"returned \[1, 4, 30\] for tokens .* \[1, 4, 31\]"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_an_import_that_fails_inside_of_the_module_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        create(asking("ours.lacking:build"), VOCAB)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"factory": "ours.models:plain", "dim": 32}, "dim has no effect with factory"),
        ({"options": {"width": 3}}, "options has no effect without factory"),
        ({"factory": "ours.models:plain", "preset": "debug"}, "preset has no effect with factory"),
        ({"factory": "ours.models"}, '"ours.models" names no function'),
    ],
)
def test_keys_that_do_not_go_together(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ModelSection.model_validate(given)


def test_a_checkpoint_knows_the_factory_and_its_options() -> None:
    record = model_record(asking("ours.models:plain", width=9).model, VOCAB)
    assert record == {
        "factory": "ours.models:plain",
        "options": {"width": 9},
        "vocab_size": VOCAB,
    }
    assert isinstance(create(asking("ours.models:plain"), VOCAB), nn.Module)
