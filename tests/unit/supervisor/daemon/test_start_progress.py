"""What is said between the launch of the ranks and their first step."""

from __future__ import annotations

import pytest

from kempner.run.control.protocol import Phase
from kempner.supervisor import daemon
from kempner.supervisor.daemon import StartProgress, describe_start


@pytest.mark.parametrize(
    ("phases", "last_step", "line"),
    [
        ([], None, "starting 2 ranks: importing torch"),
        ([Phase.LOAD], None, "starting 2 ranks: importing torch"),
        ([Phase.START, Phase.RENDEZVOUS], None, "2 ranks: importing torch"),
        ([Phase.RENDEZVOUS, Phase.LOAD], None, "2 ranks: meeting"),
        ([Phase.LOAD, Phase.LOAD], None, "2 ranks: building the model"),
        ([Phase.LOAD, Phase.LOAD], 300, "2 ranks: loading step 300"),
        ([Phase.LOAD, Phase.COMPILE], 300, ""),
        ([Phase.STEP], None, ""),
    ],
)
def test_the_slowest_rank_is_spoken_of(
    phases: list[Phase], last_step: int | None, line: str
) -> None:
    assert describe_start(2, phases, last_step) == line


def test_a_file_gets_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(10))
    progress = StartProgress(1, None, ours=True, now=lambda: float(next(clock)))
    for phase in (Phase.START, Phase.START, Phase.LOAD, Phase.STEP, Phase.LOAD):
        progress.update([phase])
    progress.close(clean=True)
    lines = [
        "starting 1 rank: importing torch",
        "1 rank: importing torch",
        "1 rank: building the model",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    StartProgress(2, None, ours=False).update([Phase.START])
    assert capsys.readouterr().out == "starting 2 ranks\n"


def test_a_terminal_is_told_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(daemon, "can_rewrite", lambda: True)
    monkeypatch.setattr(daemon, "show_for_now", shown.append)
    clock = iter([0.0, 0.1, 0.6, 1.2, 1.7, 2.3])
    progress = StartProgress(1, None, ours=True, now=lambda: next(clock))
    for _ in range(4):
        progress.update([Phase.START])
    began = "starting 1 rank: importing torch"
    assert shown == [began, *(f"1 rank: importing torch{t}" for t in ("", ", 1 s", ", 2 s"))]
