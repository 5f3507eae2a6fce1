"""What `survive` refuses, and whose the signals are before, during and after its loop."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import scaled

from kempner.run.process.exit_codes import UsageError
from kempner.training.survive import LoopRequest

LOOP = """
import os, signal, socket, sys, threading, time
import torch
from kempner import survive
from kempner.run.process.signals import inbox

def keep(number, frame): print("mine again", flush=True)

def loop(**changes):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = dict(steps=3, save_every=2, run_dir=f"run-{len(os.listdir())}") | changes
    for step in survive(model, optimizer, **options):
        optimizer.step()
        yield step

def installed():
    fd = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(fd)
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), fd
"""

AFTERWARDS = """
near, far = socket.socketpair(); near.setblocking(False)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's `&`
signal.signal(signal.SIGTERM, keep)
signal.set_wakeup_fd(near.fileno(), warn_on_full_buffer=False)
before = installed()
assert before[1] is keep
for _ in loop():
    assert installed() != before
assert installed() == before, "at its end"
for _ in loop():
    break
assert installed() == before, "after a break"
try:
    for _ in loop():
        raise KeyError
except KeyError:
    pass
assert installed() == before, "after an exception"
try:
    list(loop(save_every=0))
except Exception as error:
    print(error)
assert installed() == before, "after a refusal"
os.kill(os.getpid(), signal.SIGTERM)
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
try:
    for _ in loop():
        os.kill(os.getpid(), signal.SIGTERM)
        while not inbox().received: time.sleep(0.001)  # a thread reads it
except SystemExit as error:
    print("exit", error.code)
assert installed() == before, "after a stop"
"""

IN_A_THREAD = """
before, steps = installed(), []
thread = threading.Thread(target=lambda: steps.extend(loop()))
thread.start(); thread.join()
assert installed() == before
print(steps)
"""


AT_A_PROMPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)
before, done = installed(), []

def cell(presses, **changes):
    try:
        for step in loop(**dict(run_dir="run", steps=9) | changes):
            done.append(step)
            for _ in range(presses * (step == 4)):
                os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
    assert installed() == before

cell(1)
assert 4 <= len(done) < 9
cell(0)
assert done == list(range(1, 10)), done
done.clear()
cell(2, run_dir="another")
assert done == [1, 2, 3, 4], done
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook_home = sys.modules["torch.optim.optimizer"]
hooks = len(hook_home._global_optimizer_pre_hooks)
survivor = survive(model, optimizer, steps=2, save_every=2, run_dir="last")
assert installed() == before, "before the loop"
print([step for step in survivor if optimizer.step() is None])
assert len(hook_home._global_optimizer_pre_hooks) == hooks
for again in (lambda: list(survivor), lambda: survive(model, optimizer, steps=2, save_every=2)):
    try:
        again()
    except Exception as error:
        print(error)
"""

REFUSED = """
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(steps=2, save_every=2, run_dir="run")
for arguments, changes in (
    ((optimizer, model), {}),
    ((model, model.parameters()), {}),
    ((torch.nn.ReLU(), optimizer), {}),
    ((model, optimizer), {"save_every": 0}),
):
    try:
        survive(*arguments, **options | changes)
    except Exception as error:
        print(error)
survive(model, optimizer, **options | {"steps": 0})
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOOP + program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=scaled(200))


def test_after_the_loop_the_signals_do_what_they_did_before(tmp_path: Path) -> None:
    done = run(AFTERWARDS, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "stopped after" not in line]
    assert lines == [
        "completed 3 steps",
        "left after step 1 of 3: start it again to go on, or call steps.finish() before, where "
        "this is the end",
        "survive(save_every=0): it must be at least 1",
        "mine again",
        "interrupted",
        "exit 75",
    ]


def test_in_a_thread_it_works_without_signals_and_says_so_once(tmp_path: Path) -> None:
    done = run(IN_A_THREAD, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1, 2, 3]"
    assert done.stderr.count("no signal stops this loop, since it is not in the main thread") == 1


def test_at_a_prompt_ctrl_c_interrupts_the_loop_and_leaves_the_process(tmp_path: Path) -> None:
    """As in a notebook: the first commits and interrupts, and a second one interrupts at once."""
    (tmp_path / "cells.py").write_text(LOOP + AT_A_PROMPT)
    done = subprocess.run(
        [sys.executable, "-i"],
        input='exec(open("cells.py").read())\nprint("still there")\n',
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=scaled(200),
    )
    assert "Traceback" not in done.stderr, done.stderr
    said = re.sub(r"(?<=at step |er step )[0-9]", "N", done.stdout)
    assert said.splitlines() == [
        "stopped after step N (interrupt); start again to continue",
        "interrupted",
        "resumed at step N",
        "completed 9 steps",
        "interrupted",
        "completed 2 steps",
        "[1, 2]",
        "survive(...) was iterated over before; call it again to go on",
        'survive(): there is no script to name the run after; add run_dir="runs/NAME"',
        "still there",
    ]


def test_a_wrong_call_is_refused_in_one_sentence_before_anything_else(tmp_path: Path) -> None:
    done = run(REFUSED, tmp_path)
    assert done.stdout.splitlines() == [
        "survive(model=SGD): it must be a torch.nn.Module",
        "survive(optimizer=generator): it must be a torch.optim.Optimizer",
        "survive(model): it has no parameters, so there is nothing to save",
        "survive(save_every=0): it must be at least 1",
    ]
    assert done.stderr == "kempner: survive(steps=0): it must be at least 1\n"
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"save_every": 0}, "survive(save_every=0): it must be at least 1"),
        ({"steps": -1}, "survive(steps=-1): it must be at least 1"),
        ({"keep_last": 1}, "survive(keep_last=1): it must be at least 2"),
        ({"steps": 1e3}, "survive(steps=1000.0): write a whole number"),
        ({"seed": 0.5}, "survive(seed=0.5): write a whole number"),
        ({"accumulate": 0}, "survive(accumulate=0): it must be at least 1"),
        (
            {"accumulate": 2},
            "survive(accumulate=2): it has no data; give it the loader as data=..., or make "
            "several batches yourself in each step",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    given: dict[str, Any], sentence: str
) -> None:
    todo = LoopRequest(**{"steps": 3, "save_every": 2, "seed": 0, "keep_last": 3} | given)
    with pytest.raises(UsageError) as refused:
        todo.check(has_data=False)
    assert str(refused.value) == sentence
