"""Measures all that two cores can, keeps it in docs/performance.jsonl, and makes the pages of it.

    python benchmarks/measure.py [--list] [WORD ...]

One benchmark after the other; nothing else should be at work on the machine. What the record has
from the same command at this commit is not measured again: a run that was cut off goes on where it
was. With words, only the commands in which one of them occurs. A benchmark that fails is named in
the end, when the others are done.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
import records  # noqa: E402

RECORD = ROOT / "docs" / "performance.jsonl"
ALL = "--megabytes 300 --pairs 10 --seconds 2 --ways nothing ours 'stock async' 'stock process'"
COMMANDS = (
    f"checkpoint.py --ranks 1 {ALL}",
    f"checkpoint.py --ranks 2 {ALL}",
    "checkpoint.py --ranks 4 --megabytes 300 --pairs 8 --seconds 3 --ways nothing ours",
    "write.py --megabytes 600 --rounds 16",
    "coordination.py",
    "coordination.py --simulate 64 512 1024 16384",
    "load.py --megabytes 400",
    "load.py --simulate 128 512 1024 16384",
    "order.py",
    "prepare.py --megabytes 200 --rounds 2",
    "step_overhead.py --ranks 2 --rounds 10 --seconds 2",
    "step_overhead.py --ranks 4 --rounds 10 --seconds 2",
    "step_overhead.py --ranks 8 --rounds 10 --seconds 2",
    "in_memory/step_cost.py --rounds 20",
    "in_memory/salvage.py --rounds 9",
    "in_memory/copy_rate.py --rounds 9",
    "programs/survive_cost.py --rounds 21 --steps 30 --width 512",
    "programs/printed.py --rounds 5",
    "starts/rank_start.py --ranks 1 --rounds 5",
    "starts/rank_start.py --ranks 2 --rounds 5",
    "starts/rank_start.py --ranks 1 --rounds 3 --kinds resumed --preset debug",
    "starts/rank_start.py --ranks 2 --rounds 3 --kinds resumed --preset debug",
    "starts/restart.py --rounds 3 --kills 3",
    "starts/restart_on_nodes.py --rounds 2 --kills 3",
    "starts/job_start.py --rounds 5",
    "starts/soak.py",
    "stops.py --stops 20",
    "asked_of_slurm.py --minutes 5",
    "ways.py",
    "models/compare.py --how eager",
    "models/compare.py --how compiled",
    "models/compare.py --how best",
    "models/compare.py --how eager --size wide --steps 2",
    "models/compare.py --how eager --size vocabulary --steps 2",
    "models/compare.py --how sft --rounds 15",
    "models/compare.py --how sft --size wide --steps 2 --rounds 11",
    "reports/large_run.py",
    "goodput/decisions.py",
    "goodput/table.py",
    "goodput/prediction_drill.py --seed 10",
)


def main() -> int:
    """1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="say what there is to do, and do nothing"
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    asked = parser.parse_args()
    wanted = [c for c in COMMANDS if not asked.words or any(word in c for word in asked.words)]
    rows = records.read(RECORD)
    left = [command for command in wanted if not is_done(command, rows)]
    print(f"{len(wanted)} benchmarks, of which {len(left)} are left at {records.commit()}")
    if asked.list:
        print("\n".join(left))
        return 0
    failed = [command for command in left if not measure(command)]
    print("\n".join(f"failed: {command}" for command in failed) or "all is measured")
    return 1 if failed else 0


def is_done(command: str, rows: Sequence[records.Row]) -> bool:
    """Whether the record has it of this commit."""
    called = records.command_line(split(command))
    return any((row["command"], row["commit"]) == (called, records.commit()) for row in rows)


def split(command: str) -> list[str]:
    program, *options = shlex.split(command)
    return [str(ROOT / "benchmarks" / program), *options]


def measure(command: str) -> bool:
    """Whether it could be measured; the pages are made anew where it could."""
    print(f"\n{time.strftime('%H:%M')} {command}", flush=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *split(command), "--record", str(RECORD)]
    if subprocess.run(words, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL).returncode:
        return False
    page = ROOT / "scripts" / "docs" / "performance_page.py"
    return not subprocess.run([sys.executable, page], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
