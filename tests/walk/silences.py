"""How long each command shows nothing at a terminal, while a person waits for it.

    python tests/walk/silences.py [WORD ...] [--record docs/silences.jsonl]

Types each command into a terminal of its own, in a new folder with a small project, and prints how
long it took, the longest time in which nothing on the screen changed, and what stood there. With
words, only the commands in which one of them occurs are shown; those before them that they need are
run as well. The commands are those of the environment that runs this. Exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

import records  # noqa: E402
from terminal import Terminal, lines_of  # noqa: E402

CONFIG = """
[model]
dim = 128
n_layers = 4
n_heads = 4
max_seq_len = 128
[train]
max_steps = 60
global_batch_size = 8
micro_batch_size = 8
seq_len = 128
[data]
dataset_path = "data"
[checkpoint]
interval = 20
"""

COMMANDS = {
    "kempner init new": "kempner/project",
    "kempner prepare --out data texts": "kempner/data/prepare",
    "kempner config check train.toml --world 2": "kempner/config",
    "kempner doctor train.toml": "kempner/insight/doctor",
    "kempner plan train.toml --world 8": "kempner/training/plan",
    "kempner supervise train.toml": "kempner/supervisor",
    "kempner supervise train.toml --nproc 2 --train.max_steps=80": "kempner/supervisor",
    "kempner train train.toml --run.name=alone": "kempner/training",
    "kempner status runs/train": "kempner/insight/status",
    "kempner report runs/train": "kempner/insight/report",
    "kempner triage runs/train": "kempner/insight/triage",
    "kempner checkpoint list runs/train": "kempner/checkpoint",
    "kempner checkpoint verify runs/train": "kempner/checkpoint",
    "kempner checkpoint export runs/train --out hf": "kempner/checkpoint/convert",
    "kempner checkpoint import runs/alone --into runs/again": "kempner/checkpoint/convert",
    "kempner compare runs/train/checkpoints runs/alone/checkpoints": "kempner/checkpoint",
    "kempner eval runs/train --data data": "kempner/training/observe",
    "kempner rehearse -- python new/surviving.py": "kempner/rehearse",
    "kempner sample runs/train --prompt 'The value' --max-tokens 300": "kempner/model",
}
"""What is typed, in this order, and whose code it is that shows something, or does not."""

DIFFERS = {"kempner compare runs/train/checkpoints runs/alone/checkpoints": 1}
"""Exit codes that are no success: the two are not equal."""


def listen(typed: str, folder: Path) -> Terminal:
    """Type a command, and watch the screen to its end."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    terminal = Terminal.open(typed, folder, {"PATH": path, "HF_HUB_OFFLINE": "1"})
    try:
        while not terminal.has_ended():
            select.select([terminal.master], [], [], 0.02)
    finally:
        terminal.end()
    if terminal.shell.returncode != DIFFERS.get(typed, 0):
        print("\n".join(lines_of(bytes(terminal.shown))[-30:]))
    return terminal


def set_up(folder: Path) -> None:
    """Python's help topics as texts, and a small model."""
    from pydoc_data.topics import topics

    (folder / "texts").mkdir()
    for number, text in enumerate(topics.values()):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "train.toml").write_text(CONFIG)


def main() -> int:
    """1 if a command failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, help="where to keep what was found")
    parser.add_argument("words", nargs="*", metavar="WORD")
    given = parser.parse_args()
    wanted = [c for c in COMMANDS if not given.words or any(word in c for word in given.words)]
    rows, failed = [], 0
    folder = Path(tempfile.mkdtemp(prefix="silences-"))
    try:
        set_up(folder)
        for typed in [*COMMANDS][: 1 + [*COMMANDS].index(wanted[-1])] if wanted else []:
            heard = listen(typed, folder)
            code = heard.shell.returncode
            failed += code != DIFFERS.get(typed, 0)
            if typed not in wanted:
                continue
            print(f"{heard.seconds:6.1f} s, silent {heard.silence:4.1f} s: {typed}", flush=True)
            print(f"{'':27}after: {heard.after[:70]}", flush=True)
            row = {"typed": typed, "seconds": round(heard.seconds, 1), "after": heard.after}
            row |= {"silence": round(heard.silence, 1), "code": code}
            rows.append(row | records.header([COMMANDS[typed], "kempner/cli"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.record:
        records.write(given.record, rows, by=("typed",), only={"typed": COMMANDS})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
