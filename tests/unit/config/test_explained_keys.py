"""`kempner config explain`: each key says what it takes and means, with an example that is true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Literal

import pytest

from kempner.cli.entry import main
from kempner.config.explain import KeyExplanation, _table, tables, toml_value
from kempner.config.loading import known_keys, load
from kempner.config.model import MEANINGS, ModelSection
from kempner.config.section import PositiveInt, Section
from kempner.model.spec.shape import count_parameters

KEYS = {key.name: key for top in tables() for key in top.all()}

NEEDED = {
    "model.options": ["--model.factory=my_model:build"],
    "model.rope_scaling.low_freq_factor": ["--model.rope_scaling.factor=8.0"],
    "model.rope_scaling.high_freq_factor": ["--model.rope_scaling.factor=8.0"],
    "model.rope_scaling.original_max_position_embeddings": ["--model.rope_scaling.factor=8.0"],
    "train.activation_checkpointing_every": ["--train.activation_checkpointing=full"],
    "train.fp8": ["--train.compile=true"],
    "train.same_on_any_world": ["--train.threads=1"],
    "integrity.parts_interval": ["--train.same_on_any_world=true", "--train.threads=1"],
    "integrity.recompute_interval": ["--train.same_on_any_world=true", "--train.threads=1"],
    "optimizer.momentum": ["--optimizer.name=sgd"],
    "optimizer.nesterov": ["--optimizer.name=sgd"],
    "scheduler.decay_steps": ["--scheduler.name=wsd"],
    **{
        f"adapter.{key}": ["--adapter.rank=16"] for key in ("alpha", "dropout", "targets", "rslora")
    },
    "preferences.beta": ["--adapter.rank=16"],
    "checkpoint.buddy": ["--checkpoint.in_memory=true"],
    "eval.interval": ["--eval.dataset_path=data/held_out"],
    **{
        f"slurm.container.{key}": ["--slurm.container.image=train.sqsh"]
        for key in ("mounts", "mount_home", "workdir")
    },
}
"""What must be set beside a key, so that it has an effect."""


def unexplained(keys: Iterable[KeyExplanation]) -> list[str]:
    """What is missing, key by key."""
    found = []
    for key in keys:
        number = re.search(r"\bnumbers?\b", key.kind) and not key.kind.startswith("two port")
        listed = key.kind.removeprefix("one of ").removeprefix("list of ")
        missing = {
            "meaning": not key.meaning.endswith("."),
            "unit": bool(number) and not key.unit,
            "example": key.example is None,
            "phrases": not all(key.values.values()),
            "values": bool(key.values) and ", ".join(key.values) != listed,
        }
        found += [f"{key.name}: {what}" for what, is_missing in missing.items() if is_missing]
    return found


def test_every_key_and_every_value_has_its_line() -> None:
    assert sorted(KEYS) == sorted(known_keys())
    assert unexplained(KEYS.values()) == []


class NewSection(Section):
    """A section that has just been written."""

    number: PositiveInt = 3
    """Has neither unit nor example."""
    choice: Literal["this", "that"] = "this"
    """Its values have no phrases."""
    switch: bool = False


def test_a_new_key_without_its_line_would_be_seen() -> None:
    assert unexplained(_table("new", NewSection).keys) == [
        "new.number: unit",
        "new.number: example",
        "new.choice: phrases",
        "new.switch: meaning",
    ]


def typed(key: KeyExplanation) -> object:
    """The value of a key whose example was typed after a command."""
    (argument,) = shlex.split(key.override)
    value: object = load(None, [*NEEDED.get(key.name, []), argument])
    for part in key.name.split("."):
        value = getattr(value, part)
    return value


def test_each_example_can_be_typed_and_is_not_the_default() -> None:
    for key in KEYS.values():
        taken_apart = key.name == "model.preset"  # into the sizes of the model
        assert typed(key) == (None if taken_apart else key.example), key.name
        assert toml_value(key.example) != key.default, key.name


@pytest.mark.parametrize(("name", "meaning"), MEANINGS.items())
def test_a_preset_has_the_parameters_that_are_told(name: str, meaning: str) -> None:
    model = ModelSection.model_validate({"preset": name})
    assert model.vocab_size is not None
    told = re.search(r"([0-9.]+) billion", meaning)
    billions = f"{count_parameters(model, model.vocab_size) / 1e9:.1f}"
    assert told is None or told[1] == billions
    assert told is not None or name in ("debug", "llama3.3-70b")


def explained(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["config", "explain", *words])
    return left.value.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "  [scheduler]    The learning rate as a pure function of the step\n"),
        ("scheduler", "  scheduler.warmup_steps  Steps of linear warm-up from 0 to the peak; a"),
        ("[slurm.container]", "  slurm.container.prefix  "),
        ("container", "[slurm.container]\n"),
        ("warmup_steps", "scheduler.warmup_steps: whole number at least 0 (steps)\n"),
        ("optimizer.betas", "optimizer.betas: list of 2 numbers at least 0 and below 1\n"),
        ("optimizer.betas", "\n  example: '--optimizer.betas=[0.9, 0.99]'\n"),
        ("scheduler.name", "\n    cosine    from the peak to the end along half a cosine\n"),
        ("scheduler.name=wsd", '\n  default: "cosine"\n  example: --scheduler.name=linear\n'),
        ("interval", "eval.interval: whole number above 0 (steps)\n"),
        ("interval", "checkpoint.interval: whole number above 0 (steps)\n"),
    ],
)
def test_a_key_and_a_section_are_explained(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(*words.split()) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.max_stepz", "unknown key train.max_stepz; did you mean train.max_steps?"),
        ("max_stepz", "did you mean train.max_steps?"),
        ("train.warmup_step", "did you mean scheduler.warmup_steps?"),
        ("trian", "did you mean train?"),
        ("qqq", "unknown section qqq; the sections here are run, model"),
        (
            "parallelism.pipeline_parallel_degree",
            "kempner has no pipeline parallelism, as with 1; remove it",
        ),
    ],
)
def test_a_misspelt_one_is_answered_with_a_guess(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(word) == 2
    assert said in capsys.readouterr().err
