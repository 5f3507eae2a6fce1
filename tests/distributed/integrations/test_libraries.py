"""Programs of other libraries under kempner: stopped and killed, and nothing of it is to be seen.

Each program notes for each step what it trains on and how large the loss is. What it notes last
for a step counts, since a step that was lost is made again.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import warm
from harness import KEMPNER, Job, drills

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.ledger import read_lines

OWN = Path(__file__).with_name("own")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.cold("a program of the user's is started by its command, as users do"),
]


@dataclass(frozen=True)
class Program:
    """One of the programs in `own`, what is set for it, and `options` of its supervisor; `steps`
    are its optimizer steps."""

    script: str
    steps: int
    settings: dict[str, str] = field(default_factory=dict)
    ranks: int = 2
    options: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        """Its run directory, in the folder in which it was started."""
        return Path("runs") / Path(self.script).stem

    def environment(self, troubles: str) -> dict[str, str]:
        """For one start."""
        path = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
        mine = {"PYTHONPATH": path, "TROUBLE": troubles, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **mine, **self.settings}

    def until_done(self, folder: Path, troubles: str = "") -> list[int]:
        """Start it, again and again while it asks to be; its exit codes."""
        folder.mkdir(parents=True)
        codes: list[int] = []
        while not codes or (codes[-1] == ExitCode.STOPPED and len(codes) < 8):
            codes.append(self.start(folder, troubles))
        return codes

    def start(self, folder: Path, troubles: str = "") -> int:
        """Start it once in `folder`; its exit code."""
        log = folder / f"start-{len(list(folder.glob('start-*.out')))}.out"
        command = [*KEMPNER, "supervise", f"--nproc={self.ranks}", *self.options, "--"]
        command += [sys.executable, str(OWN / self.script)]
        with open(log, "wb") as out:
            process = warm.start(command, self.environment(troubles), out, folder)
        return Job(process, log).wait(120)


@dataclass(frozen=True)
class Notes:
    """What a rank has noted: for each step its samples and losses, as often as it was made."""

    made: dict[int, list[tuple[tuple[int, ...], str]]]

    @classmethod
    def read(cls, folder: Path, rank: int) -> Notes:
        """Of the program that ran in `folder`."""
        made: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        for line in read_lines(folder / f"notes-{rank}.jsonl"):
            made.setdefault(line["step"], []).append((tuple(line["samples"]), line["loss"]))
        return cls(made)

    def last(self, micro_batches: dict[int, int]) -> dict[int, list[tuple[tuple[int, ...], str]]]:
        """Of each step the micro batches of the last time that it was made."""
        return {step: noted[-micro_batches[step] :] for step, noted in self.made.items()}

    @property
    def micro_batches(self) -> dict[int, int]:
        """How many there are in each step, where each was made once."""
        return {step: len(noted) for step, noted in self.made.items()}


def trainer(kind: str, workers: int, accumulation: int) -> Program:
    """Of transformers or TRL; 96 samples, twice two at a time, three times."""
    settings = {"TRAINER": kind, "WORKERS": str(workers), "ACCUMULATION": str(accumulation)}
    return Program("own_trainer.py", 3 * 96 // (4 * accumulation), settings)


def lightning(workers: int, accumulation: int) -> Program:
    """As many samples and steps."""
    settings = {"WORKERS": str(workers), "ACCUMULATION": str(accumulation)}
    return Program("own_lightning.py", 3 * 96 // (4 * accumulation), settings)


def accelerate(workers: int, accumulation: int) -> Program:
    """As many samples and steps."""
    settings = {"WORKERS": str(workers), "ACCUMULATION": str(accumulation)}
    return Program("own_accelerate.py", 3 * 96 // (4 * accumulation), settings)


PROGRAMS = [
    trainer("Trainer", 2, 4),
    lightning(2, 4),
    accelerate(2, 4),
    *drills(
        accelerate(0, 4),
        lightning(0, 4),
        lightning(0, 1),
        trainer("Trainer", 0, 4),
        trainer("Trainer", 0, 1),
        trainer("SFTTrainer", 2, 4),
        trainer("SFTTrainer", 0, 4),
    ),
]


def named(program: object) -> str:
    assert isinstance(program, Program)
    return "-".join([Path(program.script).stem, *program.settings.values()])


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_three_stops_and_a_kill_change_no_bit_and_no_sample(
    program: Program, tmp_path: Path
) -> None:
    """In the second epoch and later, at steps drawn anew for each program."""
    drawn = random.Random(named(program))
    first = program.steps // 3 + 1
    *stops, kill = drawn.sample(range(first, program.steps - 1), 4)
    troubles = " ".join(
        [*(f"stop@{step}.{drawn.randrange(2)}" for step in stops), f"kill@{kill}.1"]
    )
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert program.until_done(undisturbed) == [0], outputs(undisturbed)
    codes = program.until_done(disturbed, troubles)

    ledger = list(read_lines(disturbed / program.run / "ledger.jsonl"))
    stopped = [line for line in ledger if line["event"] == "stopped"]
    assert codes == [75] * len(stopped) + [0], outputs(disturbed)
    assert 1 <= len(stopped) <= 3, troubles  # two signals may come to one stop
    assert [line["lost_steps"] for line in stopped] == [0] * len(stopped)
    assert len([line for line in ledger if line["event"] == "restarting"]) == 1

    seen: Counter[int] = Counter()
    for rank in range(program.ranks):
        plain, struck = Notes.read(undisturbed, rank), Notes.read(disturbed, rank)
        assert sorted(plain.made) == list(range(1, program.steps + 1))
        assert struck.last(plain.micro_batches) == plain.last(plain.micro_batches), troubles
        ours, theirs = (torch.load(f / f"final-{rank}.pt") for f in (disturbed, undisturbed))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        seen.update(sample for noted in plain.made.values() for ids, _ in noted for sample in ids)
    made_again = {step for step, n in struck.made.items() if len(n) > plain.micro_batches[step]}
    assert len(made_again) <= 5 + 1  # those since the last commit
    assert seen == Counter(dict.fromkeys(range(96), 3))


@pytest.mark.parametrize(("before", "after", "stop"), [(2, 1, "stop@5"), (1, 2, "stop@6")])
def test_another_number_of_ranks_repeats_no_sample_and_misses_none(
    before: int, after: int, stop: str, tmp_path: Path
) -> None:
    """Though a step takes another number of samples then, from within an epoch on."""
    program, folder = trainer("Trainer", workers=2, accumulation=1), tmp_path / "run"
    folder.mkdir()
    assert replace(program, ranks=before).start(folder, stop) == ExitCode.STOPPED, outputs(folder)
    assert replace(program, ranks=after).start(folder, stop) == 0, outputs(folder)
    of_ranks = [Notes.read(folder, rank).made for rank in range(2)]
    epochs, epoch = 0, list[int]()
    for step in range(1, len(of_ranks[0]) + 1):
        taken = [ids for made in of_ranks for ids, _ in made.get(step, [])]
        epoch += [sample for ids in taken for sample in ids]
        if set(epoch) == set(range(96)):
            assert len(set(epoch[:96])) == 96  # what is left fills its last step
            epochs, epoch = epochs + 1, []
    assert (epochs, epoch) == (3, [])


def test_torchtitan_stops_and_restarts_as_exactly_as_it_resumes(tmp_path: Path) -> None:
    """By its own checkpoints, every five steps: kempner knows its program by what it prints."""
    options = ("--program.progress_pattern=step: +([0-9]+) ",)
    program = Program("own_titan.py", 36, {"ACCUMULATION": "4"}, options=options)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert program.until_done(undisturbed) == [0], outputs(undisturbed)
    codes = program.until_done(disturbed, "warn@14 warn@19 kill@27.1 warn@33")
    assert codes == [75] * 3 + [0], outputs(disturbed)

    ledger = list(read_lines(disturbed / program.run / "ledger.jsonl"))
    assert len([line for line in ledger if line["event"] == "restarting"]) == 1
    advanced = [line["step"] for line in ledger if line["event"] == "program_advanced"]
    assert advanced[-1] == 36
    seen: Counter[int] = Counter()
    for rank in range(program.ranks):
        plain, struck = Notes.read(undisturbed, rank), Notes.read(disturbed, rank)
        assert struck.last(plain.micro_batches) == plain.last(plain.micro_batches)
        ours, theirs = (torch.load(f / f"final-{rank}.pt") for f in (disturbed, undisturbed))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        made_again = sum(map(len, struck.made.values())) // 4 - program.steps
        assert 0 < made_again <= 4 * (5 + 1)  # those since its last checkpoint, each time
        seen.update(sample for noted in plain.made.values() for ids, _ in noted for sample in ids)
    assert seen == Counter(dict.fromkeys(range(96), 6))


def test_grpo_stops_in_the_middle_of_the_completions_it_has_generated(tmp_path: Path) -> None:
    """Those of the example serve four steps; the stop and the kill come at steps drawn anew."""
    program = Program("own_grpo.py", 16, ranks=1)
    stop, kill = sorted(random.sample([s for s in range(2, 15) if s % 4], 2))
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert program.until_done(undisturbed) == [0], outputs(undisturbed)
    codes = program.until_done(disturbed, f"stop@{stop} kill@{kill}")
    assert codes == [75, 0], outputs(disturbed)
    plain, struck = Notes.read(undisturbed, 0), Notes.read(disturbed, 0)
    assert sorted(plain.made) == list(range(1, program.steps + 1))
    assert struck.last(plain.micro_batches) == plain.last(plain.micro_batches), (stop, kill)
    ours, theirs = (torch.load(f / "final-0.pt") for f in (disturbed, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [loss for noted in plain.made.values() for _, loss in noted]
    assert len({*losses}) > program.steps


def test_experts_that_are_spread_over_ranks_change_no_bit(tmp_path: Path) -> None:
    """By the example's loop: stopped, and killed where a rank holds other experts than its peer."""
    program = Program("own_experts.py", 60)
    drawn = random.Random(4).sample(range(2, 59), 2)
    stop, kill = sorted(drawn)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert program.until_done(undisturbed) == [0], outputs(undisturbed)
    codes = program.until_done(disturbed, f"stop@{stop}.1 kill@{kill}.1")
    assert codes == [75, 0], outputs(disturbed)
    for rank in range(program.ranks):
        plain, struck = Notes.read(undisturbed, rank), Notes.read(disturbed, rank)
        assert sorted(plain.made) == list(range(1, program.steps + 1))
        assert struck.last(plain.micro_batches) == plain.last(plain.micro_batches), (stop, kill)
        ours, theirs = (torch.load(f / f"final-{rank}.pt") for f in (disturbed, undisturbed))
        assert any("experts" in name for name in theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.drill
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_stops_and_restarts_as_exactly_as_it_saves(stage: int, tmp_path: Path) -> None:
    """By its own checkpoints, of a stop and every ten steps; `make check` has its parts, the vote
    (`test_by_hand.py`) and programs with checkpoints of their own."""
    pytest.importorskip("deepspeed")
    options = ("--program.progress_pattern=step ([0-9]+) ",)
    program = Program("own_deepspeed.py", 40, {"ZERO": str(stage)}, options=options)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert program.until_done(undisturbed) == [0], outputs(undisturbed)
    codes = program.until_done(disturbed, "stop@7 stop@14.1 kill@26.1")
    assert codes == [75, 75, 0], outputs(disturbed)
    for rank in range(program.ranks):
        plain, struck = Notes.read(undisturbed, rank), Notes.read(disturbed, rank)
        assert struck.last(plain.micro_batches) == plain.last(plain.micro_batches)
        assert {step for step, noted in struck.made.items() if noted[1:]} <= set(range(21, 28))


def outputs(folder: Path) -> str:
    return json.dumps([log.read_text()[-3000:] for log in sorted(folder.glob("start-*.out"))])
