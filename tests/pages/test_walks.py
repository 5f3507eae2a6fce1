"""The walks of `make walk` find on their pages all that they need; here nothing is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli
from blocks import Command, to_do
from harness import ROOT

sys.path.append(str(ROOT / "tests" / "walk"))
import walks
from walks import WALKS, Part, fault_of

EXTRAS = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def lacking(todo: Sequence[Path | Command], brought: Sequence[str] = ()) -> list[str]:
    """What a reader would be stuck at who does all that in this order."""
    found, there, installed, stopped = [], {*brought}, False, {""}
    for do in todo:
        if isinstance(do, Path):
            there.add(do.name)
            continue
        if extra := re.match(r"pip install '?kempner(?:\[(\w+)\])?'?$", do.text):
            installed = extra[1] is None or extra[1] in EXTRAS
        elif do.text.startswith(("kempner ", "sbatch ")) and not installed:
            found.append(f"nothing is installed before: {do.text}")
        used = re.findall(r"(?:python|wrap) (\S+\.\w+)", do.text)
        found += [f"{name} is not there before: {do.text}" for name in used if name not in there]
        if "^C" in do.shown or do.text.startswith("sbatch "):
            stopped.add(do.text)
        elif any("resumed at step" in line for line in do.shown) and do.text in stopped:
            stopped.add("resumed")
    if "resumed" not in stopped and not any(text.startswith("sbatch ") for text in stopped):
        found.append("nothing is stopped and started again")
    return found


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_has_all_that_it_needs_on_its_pages(name: str, tmp_path: Path) -> None:
    if (bring := WALKS[name].bring) is not None:
        bring(tmp_path)
    todo = WALKS[name].to_do()
    assert lacking(todo, [path.name for path in tmp_path.iterdir()]) == []
    examples = [do for do in todo if isinstance(do, Path)]
    assert [do for do in examples if not (walks.DOCS / do).exists()] == []


def test_the_jobs_are_submitted_on_a_cluster() -> None:
    typed = [do for name in ("student", "administrator") for do in WALKS[name].to_do()]
    there = [do.text for do in typed if isinstance(do, Command) and do.on_cluster]
    assert sum(text.startswith("sbatch ") for text in there) == 2
    assert any(text.startswith("scontrol show config") for text in there)
    assert not any(text.startswith("pip install") for text in there)  # it has no way out


PAGE = """
Save [this](examples/mine.py), then
```console
$ pip install 'kempner[transformers]'
$ kempner supervise -- python mine.py
step 3 loss 0.1
^C
$ kempner supervise -- python mine.py
resumed at step 3
```
<!-- walk: on a cluster -->
```console
$ sbatch job.sbatch
```
```sh
not typed
```
"""


def test_what_a_page_asks_for_is_read_in_its_order() -> None:
    example, install, train, again, submit = to_do(PAGE)
    assert example == Path("examples/mine.py")
    assert install == Command("pip install 'kempner[transformers]'", ())
    assert train == Command("kempner supervise -- python mine.py", ("step 3 loss 0.1", "^C"))
    assert again == Command("kempner supervise -- python mine.py", ("resumed at step 3",))
    assert submit == Command("sbatch job.sbatch", (), on_cluster=True)
    assert lacking(to_do(PAGE)) == []


@pytest.mark.parametrize(
    ("cut", "fault"),
    [
        ("Save [this](examples/mine.py)", "mine.py is not there before: kempner supervise"),
        ("$ pip install 'kempner[transformers]'\n", "nothing is installed before: kempner"),
        ("[transformers]", ""),
        ("transformers", "nothing is installed before: kempner supervise"),
        ("^C\n", "nothing is stopped and started again"),
    ],
)
def test_a_page_on_which_a_reader_is_stuck_is_noticed(cut: str, fault: str) -> None:
    page = PAGE.replace(cut, "nothing" if cut == "transformers" else "")
    found = lacking(to_do(page.replace("$ sbatch job.sbatch\n", "$ true\n")))
    assert bool(found) == bool(fault)
    assert all(line.startswith(fault) for line in found)


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([("ready_to_train", 0), ("stopped", 7), ("ready_to_train", 7)], None),
        ([("ready_to_train", 0)], "was never stopped"),
        ([("stopped", 7), ("ready_to_train", 5)], "was stopped after step 7, and went on after 5"),
        ([("stopped", 7)], "was stopped after step 7, and went on after None"),
        (
            [("stopped", 7), ("ready_to_train", 7), ("stopped", 9), ("ready_to_train", 8)],
            "was stopped after step 9, and went on after 8",
        ),
    ],
)
def test_a_run_that_does_not_go_on_with_the_next_step_is_noticed(
    steps: list[tuple[str, int]], fault: str | None
) -> None:
    events = [{"event": event, "step": step, "lost_steps": 0} for event, step in steps]
    assert fault_of(events) == fault
    lost = [{"event": "stopped", "step": 7, "lost_steps": 2}]
    assert fault_of(lost) == "lost 2 steps at its stop after step 7"


def test_a_row_of_the_record_is_about_the_pages_that_were_typed() -> None:
    (row,) = walks.rows_of([Part("administrator", "sbatch job.sbatch", 0.1, 1, "ok")])
    assert row["proves"] == ["kempner", "docs/admins.md", "docs/wrap.md"]
    assert (row["walk"], row["outcome"]) == ("administrator", "ok")
