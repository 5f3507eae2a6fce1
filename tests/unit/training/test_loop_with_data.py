"""A loop whose data `survive` brings back: wherever it ends, and however, it trains the same.

All cells of a kind of data run in one process: an undisturbed run, and for each boundary and each
way to leave one that is left there and started again until it is complete.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import scaled

CELLS = """
import os, shutil, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset
from kempner import survive

STEPS, SAVE_EVERY, SAMPLES, BATCH = 14, 4, 22, 4  # an epoch has six batches

class Noisy(Dataset):
    def __len__(self): return SAMPLES
    def __getitem__(self, index): return torch.tensor([float(index), torch.rand(()).item()])

def stream():
    from datasets import Dataset as Hub
    column = {"x": [[float(n), 0.5] for n in range(SAMPLES)]}
    return DataLoader(
        Hub.from_dict(column).to_iterable_dataset().with_format("torch"), batch_size=BATCH,
        collate_fn=lambda rows: torch.stack([row["x"] for row in rows]),
    )

LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "accumulated": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "stream": stream,
}
kind = sys.argv[1]
BOUNDARIES = sorted({1, SAVE_EVERY - 1, SAVE_EVERY, SAVE_EVERY + 1, 6, 7, 12, STEPS - 1, STEPS})

def train(run_dir, leave=None, at=0):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = survive(
        model, optimizer, data=LOADERS[kind](), steps=STEPS, save_every=SAVE_EVERY, run_dir=run_dir,
        accumulate=2 if kind == "accumulated" else None,
    )
    for step, batch in steps:
        if leave == "untrained" and step == at:
            break
        optimizer.zero_grad()
        for part in batch if isinstance(batch, list) else [batch]:
            loss = model(part).square().mean()
            loss.backward()
        optimizer.step()
        seen.append((step, steps.epoch, repr(batch), loss.item()))
        if step % 5 == 0:
            with steps.evaluation():
                torch.rand(len(seen))
        if step == at:
            if leave == "break": break
            if leave == "return": return None
            if leave == "raise": raise KeyError("half a step")
            if leave == "stop": os.kill(os.getpid(), signal.SIGTERM)
    return [parameter.tolist() for parameter in model.parameters()], torch.rand(2).tolist()

seen = []
weights = train("undisturbed")
undisturbed = {step: rest for step, *rest in seen}
assert [*undisturbed] == [*range(1, STEPS + 1)]
for leave in ("break", "return", "raise", "stop", "untrained"):
    for at in BOUNDARIES:
        seen, starts, complete = [], 0, False
        run_dir = f"{leave}-{at}"
        while not complete:
            first, starts = not starts, starts + 1
            assert starts < 4, run_dir
            before = len(seen)
            try:
                end = train(run_dir, leave if first else None, at)
                complete = bool(seen) and seen[-1][0] == STEPS
            except KeyError:
                assert leave == "raise"
            except SystemExit as stopped:
                assert (leave, stopped.code) == ("stop", 75)
            if first and leave in ("break", "return", "untrained"):
                done = at - (leave == "untrained")
                assert len(seen) == done, run_dir
            elif leave in ("break", "return", "untrained"):
                made = [step for step, *_ in seen[before:]]
                assert made == [*range(done + 1, STEPS + 1)], run_dir
        assert end in (weights, None), run_dir
        assert end or (leave, at) == ("return", STEPS), run_dir
        assert {step: rest for step, *rest in seen} == undisturbed, run_dir
        for step, *rest in seen:
            assert rest == undisturbed[step], (run_dir, step)
        shutil.rmtree(run_dir)
print("same in", 5 * len(BOUNDARIES))
"""


@pytest.mark.parametrize("kind", ["shuffled", "accumulated", "stream"])
def test_a_loop_trains_the_same_wherever_it_was_left(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", CELLS, kind]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(200)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "same in 45"


LOOP = """
import torch
import itertools
from torch.utils.data import DataLoader, TensorDataset
from kempner import survive

def loop(run_dir, steps=12, **options):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    survivor = survive(model, optimizer, steps=steps, save_every=4, run_dir=run_dir, **options)
    for given in survivor:
        yield survivor, given
        optimizer.step()

"""

ENDS = """
def refuse(run):
    try:
        run()
    except Exception as error:
        print(type(error).__name__, error)

def idle(steps):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in survive(model, optimizer, steps=steps, save_every=50, run_dir=f"idle-{steps}"):
        pass

refuse(lambda: idle(6))
refuse(lambda: idle(60))
for survivor, step in loop("early"):
    if step == 5:
        survivor.finish()
data = DataLoader(TensorDataset(torch.arange(3.0)))
print([(step, batch[0].item()) for _, (step, batch) in loop("data", 4, data=data)])
refuse(lambda: next(loop("iterator", 8, data=iter(data))))
refuse(lambda: next(loop("named", 8, data=data, state={"data": {}})))
bar = enumerate(loop("bar"))
for number, _ in bar:
    if number == 2:
        break
del bar
for _ in itertools.islice(loop("sliced"), 4):
    pass
kept = loop("kept")
print([next(kept)[1] for _ in range(3)])
"""

AGAIN = """
print([step for _, step in loop("early")])
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOOP + program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=scaled(200))


def test_what_ends_a_loop_and_what_it_refuses(tmp_path: Path) -> None:
    done = run(tmp_path, ENDS)
    assert done.returncode == 0, done.stderr
    idle = (
        "a step of survive(...) is one of the optimizer; train in the loop, and for several "
        "batches a step give survive(accumulate=...)"
    )
    on = "start it again to go on, or call steps.finish() before, where this is the end"
    assert done.stdout.splitlines() == [
        f"UsageError no optimizer has stepped in 6 steps in a row: {idle}",
        f"UsageError no optimizer has stepped in 8 steps in a row: {idle}",
        "completed 5 steps",
        "completed 4 steps",
        "[(1, 0.0), (2, 1.0), (3, 2.0), (4, 0.0)]",
        "UsageError survive(data=...): a _SingleProcessDataLoaderIter ends once it was read, and "
        "has no place; give it a DataLoader of a data set with a length, torchdata's "
        "StatefulDataLoader, or a stream with state_dict and load_state_dict, such as Hugging "
        "Face's IterableDataset",
        "UsageError survive(state=...): the place in the data comes back by itself; leave 'data' "
        "out of state, or give it another name",
        f"left after step 2 of 12: {on}",
        f"left after step 3 of 12: {on}",
        "[1, 2, 3]",
    ]
    assert done.stderr.splitlines()[-1] == (
        "kempner: the loop was left after step 2 of 12 by an exception, or with its iterator kept "
        "in a variable; the steps since the newest checkpoint are made again at the next start"
    )
    again = run(tmp_path, AGAIN)
    said = ["resumed at step 5", "completed 5 steps", "[]"]
    assert again.stdout.splitlines() == said, again.stderr
