"""What a resume tells of a configuration that has changed."""

from __future__ import annotations

from pathlib import Path

from kempner.run.record.recorded_config import changes_since, describe_changes, differences
from kempner.run.record.run_dir import RunDirectory


def test_each_key_that_differs_is_named_with_both_values() -> None:
    before = {"optimizer": {"lr": 4e-3, "betas": [0.9, 0.95]}, "run": {"name": "a"}}
    now = {
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
        "run": {"name": "b"},
        "eval": {"x": True},
    }
    changes = differences(before, now)
    assert changes == ["eval.x unset -> true", "optimizer.lr 0.004 -> 0.001", "run.name a -> b"]
    assert describe_changes(changes[:1]) == "; changed since: eval.x unset -> true"
    assert describe_changes([]) == ""
    assert (
        describe_changes(list("abcdefghij"))
        == "; changed since: a, b, c, d, e, f, g, h, and 2 more"
    )


def test_an_attempt_has_its_own_configuration_or_the_first_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert changes_since(run, 1, {"a": 2}) == []
    run.config.write_text("a = 1\n")
    run.attempt(2).mkdir(parents=True)
    run.changed_config(2).write_text("a = 2\n")
    assert changes_since(run, 1, {"a": 2}) == ["a 1 -> 2"]
    assert changes_since(run, 2, {"a": 2}) == []
    run.changed_config(2).write_text("not TOML")
    assert changes_since(run, 2, {"a": 2}) == []
