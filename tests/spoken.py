"""Every message of every role, made up: what either side of a link may say."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from pydantic import JsonValue

from kempner.run.control.protocol import (
    FromRank,
    FromSupervisor,
    Reason,
    decode_from_rank,
    decode_from_supervisor,
)
from kempner.run.link.auth import decode_hello, new_nonce
from kempner.run.link.messages import Challenge, Hello, Natural, Nonce, Proof, Welcome, decoder
from kempner.run.process.exit_codes import StopReason
from kempner.supervisor.launchers.agents.messages import (
    FromAgent,
    ToAgent,
    decode_from_agent,
    decode_to_agent,
)


@dataclass(frozen=True)
class Side:
    """Who says what, and how the other side understands it."""

    name: str
    kinds: Any
    decode: Callable[[bytes], Any]


SIDES = (
    Side("caller", Hello, decode_hello),
    Side("listener", Challenge | Welcome, decoder(Challenge | Welcome)),
    Side("rank", FromRank, decode_from_rank),
    Side("supervisor to rank", FromSupervisor, decode_from_supervisor),
    Side("agent", FromAgent, decode_from_agent),
    Side("supervisor to agent", ToAgent, decode_to_agent),
)

words = st.text(st.characters(codec="utf-8"), max_size=60)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=10,
)
nonces = st.builds(new_nonce)

_KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    Natural: st.integers(0, 2**53),
    Nonce: nonces,
    Proof: nonces.map(lambda nonce: 2 * nonce),
    Reason: st.sampled_from(list(StopReason)[1:]),
    bool: st.booleans(),
    int: st.integers(0, 255),
    float: st.floats(0.001, 1),
    str: words,
    Path: words.map(lambda text: Path("/", text.replace("\0", "").replace("/", ""))),
    JsonValue: values,
    type(None): st.none(),
}


def said_by(side: Side) -> st.SearchStrategy[Any]:
    """Any message that a side may say."""
    return _of(side.kinds)


def _of(hint: Any) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _KNOWN:
        return _KNOWN[hint]
    if origin is Annotated:
        return _of(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_of, inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(_of, inner), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert is_dataclass(hint), hint
    hints = get_type_hints(hint, include_extras=True)
    told = [f.name for f in fields(hint) if f.name not in ("kind", "version")]
    return st.builds(hint, **{name: _of(hints[name]) for name in told})
