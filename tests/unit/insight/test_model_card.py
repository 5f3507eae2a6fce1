"""A model's card says what is known, all of it, and nothing else; every reader can read it."""

from __future__ import annotations

import re
from dataclasses import fields

import tomli
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kempner.insight.model_card import CardFacts, DataFacts, card

COUNTS = st.integers(0, 10**13)
TEXT = st.text(max_size=12)
NUMBERS = st.floats(0, 20)
TABLES = st.dictionaries(
    st.sampled_from(["model", "train"]),
    st.dictionaries(st.text("abc_", min_size=1), st.integers(0, 9) | TEXT | st.booleans()),
)
FACTS = st.builds(
    CardFacts,
    name=TEXT,
    step=COUNTS,
    loads=st.booleans(),
    tokens=COUNTS,
    total_steps=st.none() | COUNTS,
    data=st.none() | st.builds(DataFacts, TEXT, COUNTS, COUNTS, TEXT, TEXT),
    worlds=st.lists(st.integers(1, 4096), max_size=3),
    wall_seconds=st.none() | NUMBERS,
    restarts=st.none() | COUNTS,
    steps_lost=st.none() | COUNTS,
    loss=st.none() | NUMBERS,
    evaluations=st.dictionaries(st.text("abc", max_size=3), st.floats(0, 900), max_size=3),
    versions=st.dictionaries(st.sampled_from(["kempner", "torch"]), TEXT),
    base_model=st.just({}) | st.fixed_dictionaries({"repository": TEXT}),
    config=TABLES,
)
ROWS = {
    "data": "Data",
    "base_model": "Base model",
    "loss": "Training loss",
    "worlds": "Ranks",
    "wall_seconds": "Wall time",
    "restarts": "Restarts",
    "versions": "Software",
}


@given(FACTS)
def test_what_is_known_is_there_and_what_is_not_is_left_out(facts: CardFacts) -> None:
    text = card(facts)
    _, head, body = text.split("---\n", 2)
    told = yaml.safe_load(head)
    assert ("library_name" in told) == facts.loads
    assert told.get("base_model") == facts.base_model.get("repository")
    table, _, rest = body.partition("## Configuration")
    rows = dict(re.findall(r"^\| (.+?) \| (.*) \|$", table, re.MULTILINE))
    for name in {field.name for field in fields(facts)} & ROWS.keys():
        value = getattr(facts, name)
        assert (ROWS[name] in rows) == (value not in (None, {}, [])), name
    assert rows["Steps"].startswith(f"{facts.step:,}")
    assert sum(name.startswith("Loss on ") for name in rows) == len(facts.evaluations)
    if facts.config:
        found = re.fullmatch(r"\s*(`{3,})toml\n(.*)\n\1\n", rest, re.DOTALL)
        assert found is not None
        assert tomli.loads(found[2]) == facts.config
    else:
        assert not rest
