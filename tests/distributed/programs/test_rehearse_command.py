"""`kempner rehearse -- COMMAND` as it is typed: what it says, and what it leaves behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import warm
from harness import KEMPNER
from patience import scaled

pytestmark = pytest.mark.timeout(300)

LOOP = """
import torch
from kempner import survive

torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rate = 0.1
for step in survive(model, optimizer, steps=12, save_every=4, run_dir="runs/real"):
    rate *= 0.9
    optimizer.param_groups[0]["lr"] = RATE
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def rehearse(folder: Path, *arguments: str) -> tuple[int, str]:
    log = folder / "told.out"
    with open(log, "wb") as output:
        process = warm.start([*KEMPNER, "rehearse", *arguments], os.environ, output, folder)
        code = process.wait(scaled(120))
    return code, log.read_text()


@pytest.mark.parametrize(
    ("rate", "code", "words"),
    [("0.1 * 0.9**step", 0, "exact: 12 steps on 1 rank"), ("rate", 1, "`rate` is 0.1 instead of")],
)
def test_the_code_says_whether_it_is_exact_and_the_real_run_is_not_touched(
    rate: str, code: int, words: str, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP.replace("RATE", rate))

    left, told = rehearse(tmp_path, "--", sys.executable, "train.py")

    assert (left, words in told) == (code, True), told
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_program_without_a_step_of_kempners_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')\n")

    code, told = rehearse(tmp_path, "--", sys.executable, "train.py")

    assert code == 2
    assert "without a step that can be seen" in told
    assert "Traceback" not in told


def test_without_a_command_one_sentence_says_how(tmp_path: Path) -> None:
    code, told = rehearse(tmp_path)

    assert code == 2
    assert "kempner rehearse -- python train.py" in told
