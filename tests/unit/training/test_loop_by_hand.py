"""`CheckpointManager` and `ShutdownHandler` in one process: what they hold, refuse and leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import scaled

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

HEAD = """
import os, random, signal, sys
import numpy
import torch
from kempner import CheckpointManager, ExitCode, RunError, ShutdownHandler, UsageError

def build(width=2, momentum=0.9):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.rand(3, 2)).square().sum().backward()
    optimizer.step()

def installed():
    fd = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(fd)
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), fd

def refused(call):
    try:
        call()
    except RunError as error:
        print(type(error).__name__, error)
    else:
        print("not refused")
"""

REFUSED = """
model, optimizer = build()
refused(lambda: CheckpointManager("a", model, optimizer, keep_last=1))
refused(lambda: CheckpointManager("a", 3, optimizer))
refused(lambda: CheckpointManager("a", model, optimizer, state={"best": 0.5}))
first = CheckpointManager("a", model, optimizer)
refused(lambda: CheckpointManager("./a", model, optimizer))
refused(lambda: ShutdownHandler().should_shutdown())
refused(lambda: first.save(0))
with ShutdownHandler():
    refused(lambda: ShutdownHandler().__enter__())
    first.save(5)
refused(lambda: first.save(6))
refused(lambda: CheckpointManager("a", model, optimizer))
"""

SAID = """
UsageError CheckpointManager(keep_last=1): it must be at least 2
UsageError CheckpointManager(model=int): it must be a torch.nn.Module
UsageError state['best'] is the value 0.5, which cannot be set when the run resumes: register a dict
UsageError a is the folder of another CheckpointManager of this process: give each a folder of its
UsageError should_shutdown() belongs into `with ShutdownHandler() as shutdown:`
UsageError CheckpointManager.save(step=0): it must be at least 1
UsageError there is a ShutdownHandler already: one block is for all loops in it
completed 5 steps
UsageError the checkpoints of a are closed, as at the end of the block of a ShutdownHandler: save
UsageError the run in a was completed by a loop before this one in the same process; give each loop
"""

MISFITS = """
model, optimizer = build()
first = CheckpointManager("a", model, optimizer)
refused(lambda: first.save(6))
first.close()
second = CheckpointManager("a", *build(width=3), accept_changes=["optimizer"])
refused(second.restore)
second.close()
refused(lambda: CheckpointManager("a", *build(momentum=0.5)))
"""

MISFIT_SAID = """
changed since the run began: program.py
UsageError a has checkpoints: call restore() before the loop, or name another folder
accepted: optimizer.groups[0].parameters was 6, now it is 9
changed since the run began: program.py
MismatchError model.weight has shape (3, 2), the checkpoint's (2, 2); build model and optimizer as
DataError the run in a would not be this program's result: optimizer.groups
"""

STOPS = """
def loop(folder, steps, *, signal_at=0, save_on_stop=True, raise_at=0):
    "As the page has it."
    model, optimizer = build()
    checkpoints = CheckpointManager(folder, model, optimizer, keep_last=3)
    start = checkpoints.restore() or 0
    with ShutdownHandler() as shutdown:
        for step in range(start + 1, steps + 1):
            train(model, optimizer)
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
                while not shutdown.should_shutdown():
                    pass
            if step == raise_at:
                raise KeyError("no batch")
            if save_on_stop:
                if step % 5 == 0 or shutdown.should_shutdown():
                    checkpoints.save(step)
            elif shutdown.should_shutdown():
                break
            elif step % 5 == 0:
                checkpoints.save(step)
    print("after the block", step)
    return model.weight.detach().clone(), torch.rand(1), random.random(), numpy.random.rand()

def ended(*arguments, **options):
    before = installed()
    try:
        return loop(*arguments, **options)
    except (SystemExit, KeyError) as error:
        print(type(error).__name__, error)
    finally:
        assert installed() == before

random.seed(3), numpy.random.seed(4)
whole = ended("whole", 20)
for changes in (dict(signal_at=7), dict(signal_at=9, save_on_stop=False), dict(raise_at=13)):
    random.seed(3), numpy.random.seed(4)
    ended("cut", 20, **changes)
again = ended("cut", 20)
assert all(map(torch.equal, whole[:2], again[:2])) and whole[2:] == again[2:]
"""

STOPS_SAID = """
completed 20 steps
after the block 20
stopped after step 7 (signal); start again to continue
SystemExit 75
resumed at step 7
2 steps of the optimizer after step 7 are in no checkpoint
stopped after step 7 (signal); start again to continue
SystemExit 75
resumed at step 7
KeyError 'no batch'
resumed at step 10
completed 20 steps
after the block 20
"""

TWO = """
pairs = [build(), build(width=3)]
managers = [CheckpointManager(folder, *pair) for folder, pair in zip(("a", "b"), pairs)]
assert [manager.restore() for manager in managers] == [None, None]
with ShutdownHandler() as shutdown:
    for step in range(1, 100):
        for pair in pairs:
            train(*pair)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if shutdown.should_shutdown():
            for manager in managers:
                manager.save(step)
            print("not reached")
"""

WITHOUT_HANDLER = """
model, optimizer = build()
before = installed()
checkpoints = CheckpointManager("a", model, optimizer)
assert installed() == before
for step in range(1, 8):
    train(model, optimizer)
checkpoints.save(7)  # in flight as the program ends
"""


FORGOTTEN = """
model, optimizer = build()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
checkpoints = CheckpointManager("a", model, optimizer)
for step in range(1, 8):
    train(model, optimizer)
    schedule.step()
    checkpoints.save(step)
"""


def run(program: str, folder: Path) -> tuple[int, list[str]]:
    """Its exit code, and the lines that it has printed; if it has failed, also why."""
    file = folder / "program.py"
    file.write_text(HEAD + program)
    done = subprocess.run(
        [sys.executable, file],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    lines = [line.removeprefix("kempner: ") for line in done.stdout.splitlines()]
    return done.returncode, lines + (done.stderr.splitlines() if done.returncode == 1 else [])


def compare(lines: list[str], said: str) -> None:
    """Each line begins as is said, and nothing else is."""
    wanted = said.strip().splitlines()
    printed = "\n".join(lines)
    assert len(lines) == len(wanted), printed
    for line, words in zip(lines, wanted, strict=True):
        assert line.startswith(words), printed


def events(folder: Path) -> list[str]:
    """The events in its ledger that tell how it ended."""
    ledger = read_lines(RunDirectory(folder).ledger)
    return [e["event"] for e in ledger if e["event"] in ("completed", "stopped", "left")]


def test_what_makes_no_sense_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, lines = run(REFUSED, tmp_path)
    assert code == 0, lines
    compare(lines, SAID)
    code, lines = run(MISFITS, tmp_path)
    assert code == 0, lines
    compare(lines, MISFIT_SAID)


def test_a_loop_that_was_stopped_and_broken_off_ends_as_a_whole_one(tmp_path: Path) -> None:
    code, lines = run(STOPS, tmp_path)
    assert code == 0, lines
    compare(lines, STOPS_SAID)
    assert events(tmp_path / "cut") == ["stopped", "stopped", "completed"]


def test_two_managers_stop_after_the_same_step(tmp_path: Path) -> None:
    code, lines = run(TWO, tmp_path)
    assert code == 75, lines
    latest = [CheckpointFolder(RunDirectory(tmp_path / f).checkpoints).latest() for f in ("a", "b")]
    assert latest[0] in (4, 5)
    assert latest == [latest[0]] * 2
    assert "not reached" not in lines


def test_a_manager_alone_leaves_the_signals_alone_and_loses_no_save(tmp_path: Path) -> None:
    code, lines = run(WITHOUT_HANDLER, tmp_path)
    assert code == 0, lines
    assert CheckpointFolder(RunDirectory(tmp_path / "a").checkpoints).latest() == 7
    assert events(tmp_path / "a") == ["completed"]


def test_a_scheduler_that_is_not_registered_is_told_once(tmp_path: Path) -> None:
    code, lines = run(FORGOTTEN, tmp_path)
    assert code == 0, lines
    told = [line for line in lines if line.startswith("schedule (StepLR) steps in the loop")]
    assert len(told) == 1, lines


@pytest.mark.parametrize(("ends", "code"), [("", 75), ("sys.exit(3)", 3)])
def test_a_handler_alone_tells_a_stop_from_an_end(tmp_path: Path, ends: str, code: int) -> None:
    program = f"""
with ShutdownHandler() as shutdown:
    os.kill(os.getpid(), signal.SIGTERM)
    while not shutdown.should_shutdown():
        pass
    {ends}
print("not reached")
"""
    found, lines = run(program, tmp_path)
    assert found == code, lines
    assert "stopped (signal); start again to continue" in lines
    assert "not reached" not in lines
