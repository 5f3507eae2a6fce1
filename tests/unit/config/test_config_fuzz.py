"""Whatever a file or an argument holds: a configuration or a `ConfigError`, nothing else."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import tomli_w
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kempner.config.errors import ConfigError
from kempner.config.loading import known_keys, load

VALUES = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
    | st.dates()
    | st.datetimes()
    | st.times(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below),
    max_leaves=5,
)
SECTIONS = st.sampled_from([*dict.fromkeys(key.split(".")[0] for key in known_keys()), "zzz", ""])
NAMES = st.sampled_from([*dict.fromkeys(key.split(".")[1] for key in known_keys()), "zzz", ""])
TABLES = st.dictionaries(SECTIONS, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "debug.toml"


def refusal(path: Path, *arguments: str) -> str | None:
    try:
        load(path, arguments)
    except ConfigError as error:
        return str(error)
    return None


def is_fit_to_print(sentence: str | None) -> bool:
    return sentence is None or 0 < len(sentence) < 800


@settings(max_examples=100)
@given(table=TABLES)
def test_any_table(path: Path, table: dict[str, object]) -> None:
    path.write_text(tomli_w.dumps(table), encoding="utf-8")

    assert is_fit_to_print(refusal(path))


@settings(max_examples=100)
@given(content=st.binary() | st.text(string.printable).map(str.encode))
@example(b"[train]\nmax_steps = 0x" + b"f" * 6000)
@example(b"x = 1979-13-45")
@example(b"\xef\xbb\xbf\xef\xbb\xbf")
def test_any_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    assert is_fit_to_print(refusal(path))


@settings(max_examples=100)
@given(
    key=st.sampled_from(known_keys()) | st.text(),
    text=st.text(st.characters(codec=None)) | st.text("[]{}\"'=,.0123456789 \n#eE-+_truefalsnai"),
)
def test_any_argument(path: Path, key: str, text: str) -> None:
    path.write_text("")

    assert is_fit_to_print(refusal(path, f"--{key}={text}"))
    assert is_fit_to_print(refusal(path, key, text))
