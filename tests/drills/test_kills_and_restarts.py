"""SIGKILL of a rank at moments of every kind: the supervisor heals the run where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from drilling import ALL, SEED
from harness import Run
from kills import assert_healed, note_healing, overrides, plain_start, plan_kills

pytestmark = pytest.mark.timeout(3600 if ALL else 240)

WORLD, INTERVAL, KILLS = 4, 3, 50 if ALL else 6


def test_kills_at_any_moment_heal_in_place(
    run: Run, reference: Run, tmp_path: Path, corpus: Path
) -> None:
    kills = plan_kills(KILLS, WORLD, INTERVAL, SEED)
    options = overrides(kills, WORLD, INTERVAL)
    reference.complete(WORLD, *options)
    faults = "; ".join(kill.fault for kill in kills)
    job = run.supervise(WORLD, *options, KEMPNER_FAULTS=faults)
    assert job.wait(3000 if ALL else 180) == 0, job.output()
    assert_healed(run, reference, kills, job.output())
    plain = [reference]
    if ALL:  # the machine may have got slower since
        plain.append(Run(tmp_path / "again", corpus))
        plain[-1].complete(WORLD, *options)
    note_healing("kill and restart", run, kills, plain=[plain_start(one) for one in plain])
