"""A TOML file and overrides become a `Config`; `dumps` and `digest` say what it was."""

from __future__ import annotations

import datetime
import os
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import tomli
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kempner.config.errors import PATTERNS, ConfigError
from kempner.config.loading import digest, dumps, known_keys, load
from kempner.config.sections import Config


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(text: str, name: str = "debug.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def at(config: BaseModel, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def fields(schema: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Every leaf of the schema under its dotted key, found without `known_keys`."""
    found: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def test_an_empty_file_gives_the_defaults_and_names_the_run_after_itself(write: Any) -> None:
    config = load(write("", "small-run.toml"))

    assert config.run.name == "small-run"
    assert config == Config.model_validate({"run": {"name": "small-run"}})


def test_a_name_in_the_file_or_in_an_override_beats_the_stem(write: Any) -> None:
    path = write('[run]\nname = "mine"\n', "a b.toml")

    assert load(path).run.name == "mine"
    assert load(path, ["--run.name=other"]).run.name == "other"


def test_the_run_s_folder_stays_when_the_stem_names_the_run(write: Any) -> None:
    assert load(write('[run]\ndir = "elsewhere"\n')).run.dir == "elsewhere"


def test_a_byte_order_mark_is_no_part_of_the_configuration(write: Any) -> None:
    assert load(write("\ufeff[train]\nmax_steps = 7\n")).train.max_steps == 7


@pytest.mark.parametrize(
    ("argument", "key", "expected"),
    [
        ("--train.max_steps=1_000", "train.max_steps", 1000),
        ("--train.seed=0xff", "train.seed", 255),
        ("--optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("--optimizer.lr=1", "optimizer.lr", 1.0),
        ("--optimizer.betas=[0.9,0.95]", "optimizer.betas", [0.9, 0.95]),
        ("--optimizer.betas=[0.9,\n 0.95]", "optimizer.betas", [0.9, 0.95]),
        ("--train.deterministic=true", "train.deterministic", True),
        ("--scheduler.name=wsd", "scheduler.name", "wsd"),
        ('--scheduler.name="wsd"', "scheduler.name", "wsd"),
        ("--run.name=my-run", "run.name", "my-run"),
        ("--run.name='007'", "run.name", "007"),
        ("--run.dir=007x", "run.dir", "007x"),
        ("--data.dataset_path=/a b/c", "data.dataset_path", "/a b/c"),
        ('--data.dataset_path="with spaces"', "data.dataset_path", "with spaces"),
        ("--data.dataset_path=a=b", "data.dataset_path", "a=b"),
        ("--data.dataset_path=a # b", "data.dataset_path", "a # b"),
        ("--data.dataset_path=größe", "data.dataset_path", "größe"),
        ('--checkpoint.accept_changes=["data", "seed"]', "checkpoint.accept_changes", None),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_string(
    write: Any, argument: str, key: str, expected: object
) -> None:
    value = at(load(write("[train]\nmax_steps = 5\n"), [argument]), key)

    wanted = ["data", "seed"] if expected is None else expected
    assert (type(value), value) == (type(wanted), wanted)


def test_an_override_beats_the_file_and_leaves_the_rest_of_the_section(write: Any) -> None:
    config = load(write("[train]\nmax_steps = 5\nseed = 3\n"), ["--train.max_steps=6"])

    assert (config.train.max_steps, config.train.seed) == (6, 3)


def test_an_override_can_repair_the_file(write: Any) -> None:
    path = write('[train]\nmax_steps = "ten"\n')

    assert load(path, ["--train.max_steps=10"]).train.max_steps == 10


def test_what_is_dumped_loads_to_an_equal_configuration(write: Any) -> None:
    original = load(
        write('[run]\ndir = "a \\"quoted\\" föld"\n[optimizer]\nlr = 1e-7\n'),
        ["--checkpoint.dir=/x/y", "--eval.interval=3", "--eval.dataset_path=held out"],
    )

    assert load(write(dumps(original), "another-name.toml")) == original


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    folder=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1).filter(
        lambda text: not text.startswith("~")  # a user's home
    ),
)
def test_any_number_and_any_text_survive_the_way_through_toml(
    write: Any, lr: float, seed: int, folder: str
) -> None:
    table = {"optimizer": {"lr": lr}, "train": {"seed": seed}, "run": {"dir": folder}}
    config = load(write(tomli_w.dumps(table)))

    assert (config.optimizer.lr, config.train.seed, config.run.dir) == (lr, seed, folder)
    assert load(write(dumps(config))) == config


def test_whatever_may_be_none_is_none_by_default_so_that_leaving_it_out_says_so() -> None:
    for key, field in fields().items():
        optional = get_origin(field.annotation) in (Union, types.UnionType)
        if optional and type(None) in get_args(field.annotation):
            assert field.default is None, key


def test_every_key_of_the_schema_is_known() -> None:
    assert known_keys() == list(fields())


def patterns(part: Any) -> Iterator[str]:
    """The regular expressions in a schema."""
    if isinstance(part, dict):
        if isinstance(part.get("pattern"), str):
            yield part["pattern"]
        yield from part.get("patternProperties", ())
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from patterns(inner)


def test_no_regular_expression_is_shown_to_a_person() -> None:
    assert set(patterns(Config.model_json_schema())) == PATTERNS.keys()


def test_the_digest_depends_on_values_only(write: Any) -> None:
    one = load(write("[train]\nseed = 1\nmax_steps = 9\n[optimizer]\nlr = 1\n"))
    same = load(write("[optimizer]\nlr = 1.0\n[train]\nmax_steps = 9\nseed = 1\n"))
    other = load(write("[train]\nseed = 2\nmax_steps = 9\n[optimizer]\nlr = 1\n"))

    assert digest(one) == digest(same)
    assert digest(one) != digest(other)


def nested(key: str, value: object) -> dict[str, object]:
    """The tables that set one dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("key", known_keys())
def test_every_value_of_a_wrong_kind_is_refused_in_our_own_words(write: Any, key: str) -> None:
    section = key.rpartition(".")[0]
    wrong: list[object] = [
        True, -1, 2.5, "no such choice/", [1], ["x"], {"a": 1}, datetime.date(2024, 1, 2),
        float("nan"), float("inf"),
    ]  # fmt: skip
    refused = []
    for value in wrong:
        try:
            load(write(tomli_w.dumps(nested(key, value))))
        except ConfigError as error:
            refused.append(str(error))

    assert refused
    for sentence in refused:
        assert "debug.toml: " in sentence
        assert key in sentence or f"[{section}] " in sentence
        assert "Input should" not in sentence
        assert "is refused" not in sentence


def test_the_other_errors_are_counted(write: Any) -> None:
    path = write("[train]\nmax_steps = 0\nseed = -1\n[run]\ndir = 3\n")

    with pytest.raises(ConfigError, match=r"run\.dir must be a string in quotes, not 3 \(and 2 "):
        load(path)


def test_a_pipe_can_hold_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("[train]\nmax_steps = 11\n",))
    writer.start()
    config = load(path)
    writer.join()

    assert config.train.max_steps == 11


def test_dumps_writes_sections_in_the_order_of_the_schema(write: Any) -> None:
    """Sections of which no key is set are left out."""
    absent = {
        "adapter": "rank = 2",
        "preferences": "beta = 0.1",
        "integrity": "fingerprints = true",
    }
    text = "".join(f"[{name}]\n{key}\n" for name, key in absent.items())
    every = list(tomli.loads(dumps(load(write(text)))))
    assert every == list(Config.model_fields)
    assert list(tomli.loads(dumps(load(write(""))))) == [n for n in every if n not in absent]


def test_a_path_with_a_null_character_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: embedded null"):
        load(tmp_path / "a\0b.toml")


def test_a_tilde_is_the_home_folder_in_the_file_s_path_and_in_every_path_of_it(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write('[run]\ndir = "~/runs"\n[data]\ndataset_path = "a~/b"\n')
    config = load(Path("~/debug.toml"), ["--checkpoint.dir=~", "--eval.dataset_path=~/held"])

    assert (config.run.dir, config.data.dataset_path) == (f"{tmp_path}/runs", "a~/b")
    assert (config.checkpoint.dir, config.eval.dataset_path) == (str(tmp_path), f"{tmp_path}/held")
    assert load(write(dumps(config))) == config


ANY_WORLD = {"train.same_on_any_world": "true", "train.threads": "1"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"train.threads": ""}, "without train.threads"),
        ({"parallelism.tensor_parallel_degree": "2"}, "with parallelism.tensor_parallel_degree"),
        ({"optimizer.name": '"muon"'}, 'with optimizer.name="muon"'),
        ({"train.fp8": "true", "train.compile": "true"}, "with train.fp8"),
        ({"model.factory": '"models:make"'}, "with model.factory"),
    ],
)
def test_the_same_on_any_world_is_refused_where_it_cannot_hold(
    write: Any, more: dict[str, str], why: str
) -> None:
    asked = [f"--{key}={value}" for key, value in (ANY_WORLD | more).items() if value]
    with pytest.raises(ConfigError, match=f"same_on_any_world does not work {why}"):
        load(write(""), asked)


def test_what_may_be_the_same_on_any_world_changes_no_digest_where_it_is_off(write: Any) -> None:
    plain = load(write(""), [])
    assert "same_on_any_world" not in dumps(plain)
    on = load(write(""), [f"--{key}={value}" for key, value in ANY_WORLD.items()])
    assert digest(on) != digest(load(write(""), ["--train.threads=1"]))
