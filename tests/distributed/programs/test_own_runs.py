"""Each command, each set of variables and each loop of a process trains a run of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import KEMPNER, wait_until
from patience import scaled

pytestmark = pytest.mark.timeout(scaled(200))

SWEEP = """
import os, sys, torch
from kempner import survive

rate = float(sys.argv[1])
torch.manual_seed(int(os.environ.get("SEED", "0")))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
trained = 0
for step in survive(model, optimizer, steps=6, save_every=3):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    trained += 1
print("trained", trained, "weights", model.weight.sum().item())
"""

FOLDS = """
import os, signal, torch
from pathlib import Path
from kempner import survive

torch.manual_seed(7)
X = torch.randn(60, 8)
Y = X.sum(1, keepdim=True) + torch.randn(60, 1)
for fold in range(3):
    held_out = torch.arange(60) % 3 == fold
    torch.manual_seed(fold)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained = 0
    for step in survive(model, optimizer, steps=20, save_every=5, seed=fold):
        loss = (model(X[~held_out]) - Y[~held_out]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained += 1
        if fold == 1 and step == 12 and os.path.exists("stop"):
            how = Path("stop").read_text()
            os.remove("stop")
            os.kill(os.getpid(), signal.SIGTERM) if how == "stop" else os._exit(9)
    print("fold", fold, "trained", trained, "weights", model.weight.sum().item(), flush=True)
"""

SHADOWS = ("tokenize", "types", "queue", "random", "profile")
"""Modules of Python's own that a file of the project may be named as."""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test that fails leaves running is killed."""
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(tmp_path):
                process.kill()


def start(
    folder: Path, command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=scaled(120))
    return process.returncode, text


def trained(text: str) -> list[tuple[int, str]]:
    """How many steps each loop has made, and what its weights came to."""
    return [(int(n), w) for n, w in re.findall(r"trained (\d+) weights (\S+)", text)]


def test_a_sweep_seeds_and_projects_each_train_their_own_run(tmp_path: Path) -> None:
    for project in ("one", "two"):
        (tmp_path / project).mkdir()
        (tmp_path / project / "train.py").write_text(SWEEP)
    points = [
        (["one/train.py", "0.1"], {}),
        (["one/train.py", "0.001"], {}),
        (["one/train.py", "0.1"], {"SEED": "1"}),
        (["two/train.py", "0.1"], {"SEED": "2"}),
    ]
    begun = [start(tmp_path, [sys.executable, *words], environ) for words, environ in points]
    first = [end(process) for process in begun]  # all at the same time
    assert [code for code, _ in first] == [0] * len(points), first
    results = [trained(text) for _, text in first]
    assert [[steps for steps, _ in result] for result in results] == [[6]] * len(points)
    assert len({str(result) for result in results}) == len(points)
    assert len(list((tmp_path / "runs").iterdir())) == len(points)

    words, environ = points[2]
    supervise = [*KEMPNER, "supervise", "--", sys.executable, *words]
    code, text = end(start(tmp_path, supervise, environ))
    assert (code, trained(text)) == (0, [(0, results[2][0][1])]), text


BESIDE = """
import statistics
from kempner import survive
import secrets
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in survive(model, optimizer, steps=2, save_every=2):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
import statistics as again, resource
print("of the project:", statistics.OURS, secrets.OURS, resource.OURS, again is statistics)
"""


@pytest.mark.parametrize("supervised", [False, True])
def test_files_beside_a_script_that_are_named_as_pythons_own_are_the_scripts(
    tmp_path: Path, supervised: bool
) -> None:
    for name in ("statistics", "secrets", "resource", "select"):
        (tmp_path / f"{name}.py").write_text("OURS = True\n")
    (tmp_path / "train.py").write_text(BESIDE)
    before = ["-P", "-m", "kempner", "supervise", "--", sys.executable] if supervised else []
    code, text = end(start(tmp_path, [sys.executable, *before, "train.py"]))
    assert code == 0, text
    assert "of the project: True True True True" in text
    code, text = end(start(tmp_path, [*KEMPNER, "--version"]))
    assert code == 0, text


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Below a folder with files that must not be taken for Python's own."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is the project\\'s')\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "folds.py").write_text(FOLDS)
    return tmp_path


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("supervised", [False, True])
def test_a_loop_of_several_goes_on_where_it_was(project: Path, supervised: bool, how: str) -> None:
    alone = [sys.executable, "src/folds.py"]
    undisturbed = end(start(project, [sys.executable, "src/folds.py", "undisturbed"]))
    assert undisturbed[0] == 0, undisturbed
    kempner = [str(Path(sys.executable).with_name("kempner")), "supervise", "--"]
    command = [*kempner, *alone] if supervised else alone

    (project / "stop").write_text(how)
    code, text = end(start(project, command))
    restarted = supervised and how == "kill"
    if not restarted:
        assert code == (75 if how == "stop" else 9), text
        code, text = end(start(project, command))
    assert code == 0, text
    (saved,) = map(int, re.findall(r"resumed at step (\d+) \(loop 2\)", text))
    assert saved >= 12 if how == "stop" else saved in (5, 10)
    loops = trained(text)[-3:]
    assert [steps for steps, _ in loops] == [0, 20 - saved, 20], text
    assert [weights for _, weights in loops] == [w for _, w in trained(undisturbed[1])]
    assert not list(project.glob("runs/*/GAVE_UP"))

    if supervised:
        code, text = end(start(project, command))
        assert (code, trained(text), "nothing is started" in text) == (0, [], True), text
        (project / "src" / "folds.py").touch()  # it may be another program now
    code, text = end(start(project, command))
    assert (code, [steps for steps, _ in trained(text)]) == (0, [0, 0, 0]), text


SLOW = """
import os, time, torch
from kempner import survive
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("process", os.getpid(), flush=True)
for step in survive(model, optimizer, steps=10**6, save_every=10**6):
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
    time.sleep(0.01)
"""


def test_what_a_killed_supervisor_has_left_saves_and_is_gone_before_the_next_start(
    tmp_path: Path,
) -> None:
    """The kernel tells the wrapper of its death, and not the program in it."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "wrap.sh").write_text(f"{sys.executable} slow.py > out 2>&1\ntrue\n")
    supervise = [*KEMPNER, "supervise", "--run.name=wrapped", "--", "bash", "wrap.sh"]
    out = tmp_path / "out"
    first = start(tmp_path, supervise)
    wait_until(lambda: out.exists() and "step 20\n" in out.read_text(), "20 steps")
    left = psutil.Process(int(re.findall(r"process (\d+)", out.read_text())[0]))
    first.kill()
    first.wait()
    left.suspend()  # or it has left by itself before a busy machine has started the next one

    second = start(tmp_path, supervise)
    assert second.stdout is not None
    said = next((line for line in second.stdout if "left behind" in line), "")
    left.resume()
    assert f"left behind: process {left.pid}" in said
    wait_until(lambda: "resumed at step" in out.read_text(), "the next start")
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    second.send_signal(signal.SIGTERM)
    code, text = end(second)
    assert code == 75, text
