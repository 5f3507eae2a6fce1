"""The snippets of the pages, each a case on one rank and on two."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ELSEWHERE = {
    "docs/architecture.md: while train_state.step < last_step and not agreed.stop:": "shortened",
    "docs/by_hand.md: from kempner import CheckpointManager, ShutdownHandler": "parts of "
    "docs/examples/by_hand.py: tests/distributed/programs",
    "docs/checkpoints.md: from transformers import AutoModelForCausalLM, AutoTokenizer": "does not "
    "train: tests/unit/checkpoint/convert",
    "docs/data.md: from kempner import ResumableBatchSampler, ResumableDataLoader": "saves by "
    "itself: tests/unit/data",
    "docs/wrap.md: ++ job.sbatch": "a batch script: tests/unit/project/test_wrap.py",
    "docs/submit.md: import kempner": "tests/distributed/jobs/test_submit.py",
    "docs/migration.md: import kempner": "tests/pages/test_migration.py",
    "docs/migration.md: import torch": "tests/pages/test_migration.py",
    'docs/migration.md: """kempner supervise --nproc 2 -- python train.py"""': "tests/pages/"
    "test_migration.py",
    "docs/migration.md: import torch (2)": "tests/pages/test_migration.py",
    "docs/migration.md: #SBATCH --ntasks-per-node=4": "a batch script: tests/slurm/jobs/"
    "test_own_program.py",
    "docs/migration.md: #SBATCH --signal=B:SIGTERM@120": "a batch script: tests/slurm/jobs/"
    "test_own_program.py",
    'docs/own_loop.md: """The same loop, and it survives: kempner supervise --nproc 2 -- python '
    'surviving.py"""': "parts of docs/examples/surviving.py: tests/distributed/programs",
    "docs/own_loop.md:     slots = Slots(model, SLOTS, seed=2)  # the global batch has 6 slots on "
    "any number of ranks": "parts of docs/examples/any_world.py: tests/distributed/programs",
}
"""Snippets that are not run here, by their page and first line, and why, or where instead."""


@dataclass(frozen=True)
class Snippet:
    """A block of a page; of a diff, what stands there after the change."""

    name: str
    code: str

    @property
    def integration(self) -> str:
        """What trains in it: each is another way to start ranks and to save."""
        known = ("Fabric", "accelerator", "lightning", "surviving(")
        return next((word.strip("(") for word in known if word in self.code), "survive")


@dataclass(frozen=True)
class Case:
    snippet: Snippet
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.snippet.name}-{self.ranks}"


def snippets() -> Iterator[Snippet]:
    """All of them, by page and first line; where that is not the first of its name, by number."""
    names = Counter[str]()
    for page in PAGES:
        for kind, text in _BLOCK.findall((ROOT / page).read_text()):
            lines = text.splitlines()
            if kind == "diff":
                lines = [line[1:] for line in lines if not line.startswith("-")]
            name = f"{page}: {lines[0]}"
            names[name] += 1
            number = f" ({names[name]})" if names[name] > 1 else ""
            yield Snippet(name + number, "\n".join(lines))


TRAIN = [snippet for snippet in snippets() if snippet.name not in ELSEWHERE]
CASES = [Case(snippet, ranks) for snippet in TRAIN for ranks in (1, 2)]


def draw(cases: Sequence[Case], seed: str) -> set[Case]:
    """Of each snippet one case: on two ranks, which take thrice as long, every third."""
    by_snippet: dict[Snippet, list[Case]] = {}
    for case in cases:
        by_snippet.setdefault(case.snippet, []).append(case)
    groups = list(by_snippet.values())
    on_two = random.Random(seed).sample(range(len(groups)), k=len(groups) // 3)
    return {of_one[number in on_two] for number, of_one in enumerate(groups)}
