"""What a run is: every difference at a later start is told, or refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events import AttemptEnded, ProgramAdvanced
from kempner.run.record.identity import (
    ACCEPT_CHANGES,
    Consequence,
    RunIdentity,
    accepted_names,
    choose_run,
    command_digest,
    compare,
    describe_refusal,
    read_identity,
    refuse_other_command,
    write_identity,
)
from kempner.run.record.lease import Holder
from kempner.run.record.run_dir import RunDirectory

WORDS = st.lists(st.text("abc-=1.", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)
NAMES = st.sampled_from(["SEED", "LR", "FOLD"])
VALUES = st.one_of(
    st.integers(-3, 3), st.text("ab", max_size=3), st.lists(st.floats(0, 1), max_size=3), st.none()
)
FACTS = st.dictionaries(
    st.sampled_from(["seed", "data", "optimizer", "batch", "anything"]),
    st.one_of(VALUES, st.dictionaries(st.sampled_from(["lr", "groups"]), VALUES, max_size=2)),
)
IDENTITIES = st.builds(
    RunIdentity,
    command=WORDS,
    launched=WORDS,
    environment=st.dictionaries(NAMES, st.one_of(st.none(), st.text("01", max_size=2))),
    facts=FACTS,
    surroundings=st.dictionaries(
        st.sampled_from(["ranks", "host", "torch"]), st.one_of(st.integers(1, 3), st.text("ab"))
    ),
    files=st.dictionaries(st.sampled_from(["train.py", "model.py"]), st.sampled_from("xy")),
)
REFUSED = {"command", "launched", "environment", "facts"}
"""Fields of which the result depends; a difference in any other is told."""


def verdicts(before: RunIdentity, now: RunIdentity, *accepted: str) -> dict[str, Consequence]:
    return {each.name: each.verdict for each in compare(before, now, accepted)}


def differ(one: object, other: object) -> bool:
    """What only one of two values knows is no difference."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(differ(one[name], other[name]) for name in one.keys() & other.keys())
    return one != other


@given(IDENTITIES)
def test_what_is_as_it_was_is_no_difference_and_comes_back_from_its_file(one: RunIdentity) -> None:
    assert compare(one, one) == []
    assert compare(RunIdentity.from_json(one.to_json()), one) == []
    assert compare(RunIdentity(), one) == []


@given(IDENTITIES, IDENTITIES, st.sampled_from([f.name for f in fields(RunIdentity)]))
def test_each_field_that_differs_is_told_or_refused_in_one_line(
    before: RunIdentity, other: RunIdentity, name: str
) -> None:
    now = replace(before, **{name: getattr(other, name)})
    found = compare(before, now)
    old, new = getattr(before, name), getattr(now, name)
    common = old != new and not isinstance(old, dict)
    if isinstance(old, dict):
        common = any(differ(old[key], new[key]) for key in old.keys() & new.keys())
    assert bool([each for each in found if "is not told any more" not in each.sentence]) == common
    for each in found:
        assert "\n" not in each.sentence
        forgotten = each.now is None and each.name not in now.facts and name == "facts"
        told = Consequence.TOLD if forgotten or name not in REFUSED else Consequence.REFUSED
        assert each.verdict is told
    assert {each.verdict for each in compare(before, now, [each.name for each in found])} <= {
        Consequence.TOLD,
        Consequence.ACCEPTED,
    }


@given(IDENTITIES, IDENTITIES)
def test_a_refusal_names_all_that_it_refuses_and_what_to_accept(
    before: RunIdentity, now: RunIdentity
) -> None:
    found = compare(before, now)
    refused = [each for each in found if each.verdict is Consequence.REFUSED]
    sentence = describe_refusal(found, "runs/x", "do this")
    assert bool(sentence) == bool(refused)
    assert all(each.sentence in sentence for each in refused)
    names = sentence.partition(f"{ACCEPT_CHANGES}=")[2].partition(" ")[0]
    accepted = accepted_names((), {ACCEPT_CHANGES: names})
    assert not describe_refusal(compare(before, now, accepted), "runs/x", "do this")


@pytest.mark.parametrize(
    ("name", "before", "now", "verdict"),
    [
        ("steps", 20, 40, Consequence.TOLD),
        ("steps", 40, 20, Consequence.REFUSED),
        ("save_every", 5, 10, Consequence.TOLD),
        ("save_every", 10, 5, Consequence.TOLD),
        ("seed", 0, 1, Consequence.REFUSED),
        ("optimizer", {"class": "SGD"}, {"class": "AdamW"}, Consequence.REFUSED),
        ("optimizer", [{"lr": 0.1}], [{"lr": 0.01}], Consequence.REFUSED),
        ("optimizer", [{"lr": 0.1}], [{"lr": 0.1}, {"lr": 0.1}], Consequence.REFUSED),
        ("data", "abc", "abd", Consequence.REFUSED),
        ("of another version", 1, 2, Consequence.REFUSED),
    ],
)
def test_facts(name: str, before: object, now: object, verdict: Consequence) -> None:
    old, new = RunIdentity(facts={name: before}), RunIdentity(facts={name: now})
    assert verdicts(old, new) == {name: verdict}
    (difference,) = compare(old, new)
    assert "was" in difference.sentence
    assert difference.sentence.startswith(name)


def test_a_setting_that_another_version_has_added_is_no_difference() -> None:
    before = RunIdentity(facts={"optimizer": {"groups": [{"lr": 0.1, "old": 1}]}})
    now = RunIdentity(facts={"optimizer": {"groups": [{"lr": 0.1, "new": 1}]}, "more": 1})
    assert compare(before, now) == []


def test_the_parts_of_a_fact_that_differ_are_named() -> None:
    groups = [{"lr": 0.1, "names": ["a", "b"] * 300}, {"lr": 0.5}]
    other = [{"lr": 0.1, "names": ["a", "b"] * 300}, {"lr": 0.05}]
    (difference,) = compare(
        RunIdentity(facts={"optimizer": groups}), RunIdentity(facts={"optimizer": other})
    )
    assert difference.sentence == "optimizer[1].lr was 0.5, now it is 0.05"


def test_the_files_are_those_of_the_beginning_and_the_rest_is_that_of_the_last_start() -> None:
    first = RunIdentity(
        ("t.py",), surroundings={"ranks": 2}, facts={"steps": 20}, files={"t.py": "1"}
    )
    second = RunIdentity(
        ("t.py",), surroundings={"ranks": 1}, facts={"steps": 40}, files={"t.py": "2", "m.py": "1"}
    )
    kept = second.after(first)
    assert verdicts(first, second) == dict.fromkeys(["steps", "ranks", "files"], Consequence.TOLD)
    assert compare(kept, replace(second, files=first.files)) == []
    assert verdicts(kept, second) == {"files": Consequence.TOLD}
    assert kept.files == {"t.py": "1", "m.py": "1"}


def test_a_secret_is_in_no_sentence() -> None:
    secret = "hf_abcdefghijklmnopqrst"
    before = RunIdentity(("t.py", "--hub_token", secret), environment={"X": secret})
    now = RunIdentity(("t.py", "--hub_token", "none"), environment={"X": "none"})
    assert not any(secret in each.sentence for each in compare(before, now))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"command": 3}', "null"])
def test_a_file_that_says_nothing_is_none(tmp_path: Path, content: str) -> None:
    run = RunDirectory(tmp_path)
    assert read_identity(run) is None
    run.identity.write_text(content)
    assert read_identity(run) is None


def test_a_file_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    write_identity(run, RunIdentity(("t.py",)))
    newer = run.identity.read_text().replace('"command"', '"of the future": 1,\n "command"')
    run.identity.write_text(newer)
    assert read_identity(run) == RunIdentity(("t.py",))


@given(st.lists(st.tuples(WORDS, st.sampled_from(["0", "1", None])), min_size=1, max_size=12))
def test_each_command_has_one_run_whatever_the_order_of_the_starts(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[tuple[str, ...], str | None]]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    told: dict[tuple[tuple[str, ...], str | None], Path] = {}
    for words, seed in starts:
        now = RunIdentity(("train.py", *words), environment={"SEED": seed})
        chosen = choose_run(folder / "train", now)
        assert told.setdefault((words, seed), chosen.path) == chosen.path
        assert (chosen.sentence == "") == (chosen.path.name == "train")
        refuse_other_command(chosen.path, now)
        other = replace(now, command=("other.py",))
        with pytest.raises(UsageError, match=r"give it another --run\.name"):
            refuse_other_command(chosen.path, other)
        refuse_other_command(chosen.path, other, ["command"])
    assert len(set(told.values())) == len(told)


@pytest.mark.parametrize("result", ["", "checkpoint", "completed", "stopped", "progress"])
def test_a_command_that_came_to_nothing_claims_no_run(tmp_path: Path, result: str) -> None:
    """A mistyped command is corrected, and trains where it would have trained."""
    run = RunDirectory(tmp_path / "train")
    gone = asdict(replace(Holder.here(1.0), started=1))
    write_identity(run, RunIdentity(("train.py", "--lr=0,1"), claimed_by=gone))
    if result == "checkpoint":
        (run.checkpoints / "step-00000005").mkdir(parents=True)
    elif result:
        ended = AttemptEnded(0 if result == "completed" else 75, "", None, {})
        event = ProgramAdvanced(None, 700.0) if result == "progress" else ended
        run.ledger.write_text(json.dumps({"event": event.name, **event.to_fields()}) + "\n")
    corrected = RunIdentity(("train.py", "--lr=0.1"))
    chosen = choose_run(run.path, corrected).path
    assert (chosen == run.path) is not bool(result)
    assert choose_run(run.path, corrected).path == chosen  # which is its own now
    assert choose_run(run.path, RunIdentity(("train.py", "3"))).path not in (chosen, run.path)


def test_the_command_of_a_supervisor_is_known_to_a_program_that_is_alone(tmp_path: Path) -> None:
    supervised = RunIdentity(launched=("train.py", "1"))
    assert choose_run(tmp_path / "train", supervised).path.name == "train"
    assert choose_run(tmp_path / "train", RunIdentity(("train.py", "1"))).path.name == "train"
    another = choose_run(tmp_path / "train", RunIdentity(("train.py", "2")))
    assert another.path.name == f"train-{command_digest(RunIdentity(('train.py', '2')))}"
    write_identity(RunDirectory(tmp_path / "w"), RunIdentity(("a.py",), ("bash", "w.sh")))
    refuse_other_command(tmp_path / "w", RunIdentity(launched=("bash", "w.sh")))
