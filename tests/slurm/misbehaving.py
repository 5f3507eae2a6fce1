"""Slurm's commands with a shim in front of each: it answers late, wrongly, in part or not at all.

Installed in a folder that comes first on a job's PATH. What each call does is drawn from a seed and
the number of the call, and written to `log.jsonl` beside the shims. On the login machine, where the
tests ask, a shim is the command itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import python_script, wait_until

from kempner.run.record.ledger import read_lines

COMMANDS = ("scontrol", "squeue", "sacct", "scancel", "sbatch", "srun")

SHIM = '''
"""In front of one of Slurm's commands; see tests/slurm/misbehaving.py."""
import json, os, platform, random, subprocess, sys, time

REAL, SEED, SHARE, HERE = {real!r}, {seed!r}, {share!r}, {here!r}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
command = [REAL[name], *words]
if platform.node() == "login1":
    os.execv(command[0], command)

log = os.open(HERE + "/log.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
calls = os.open(HERE + "/calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
os.write(calls, b".")
number = os.lseek(calls, 0, os.SEEK_CUR)
step = name == "srun"  # whose outputs are its tasks': it is only late

def note(what, **more):
    line = dict(call=number, time=time.time(), command=name, words=words[:6], what=what, **more)
    os.write(log, (json.dumps(line) + "\\n").encode())

for word in {{*words, name}}:
    try:
        os.rename(f"{{HERE}}/hold.{{word}}", f"{{HERE}}/held.{{word}}")
    except (OSError, ValueError):
        continue
    note("held")
    while os.path.exists(f"{{HERE}}/held.{{word}}"):
        time.sleep(0.05)

chance = random.Random(f"{{SEED}}/{{number}}")
kinds = ["delay"] if step else ["delay", "drop", "unasked", "empty", "truncate", "code"]
what = chance.choice(kinds) if chance.random() < SHARE else ""
note(what)
if what == "delay":
    time.sleep(chance.uniform(1.0, 5.0))
if step:
    os.execv(command[0], command)
if what == "unasked":
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
out, err, code = done.stdout, done.stderr, done.returncode
note("done", code=code)
if what == "drop":
    sys.exit("slurm_load_jobs error: Zero Bytes were transmitted or received")
if what in ("empty", "truncate"):
    out = out[: len(out) // 2] if what == "truncate" else b""
if what == "code":
    code = 0 if code else 1
os.write(2, err)
os.write(1, out)
sys.exit(code)
'''


@dataclass(frozen=True)
class Shims:
    """The shims of one test."""

    folder: Path

    @classmethod
    def install(cls, folder: Path, seed: int, share: float = 0.3) -> Shims:
        """Shims in a new `folder`, of whose calls a `share` goes wrong."""
        folder.mkdir()
        real = {name: shutil.which(name) for name in COMMANDS}
        lines = SHIM.format(real=real, seed=seed, share=share, here=str(folder))
        text = python_script(lines, "-IS")
        for name in COMMANDS:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return cls(folder)

    @property
    def path(self) -> str:
        """A PATH on which they come first."""
        return f"{self.folder}:{os.environ['PATH']}"

    def log(self, word: str = "") -> list[dict[str, Any]]:
        """What they did, of those calls that have this word among their own."""
        lines = list(read_lines(self.folder / "log.jsonl"))
        return [line for line in lines if not word or word in (line["command"], *line["words"])]

    @contextmanager
    def hold(self, word: str) -> Iterator[None]:
        """Wait until a call with this word comes, and keep it waiting for the length of the block.

        To be entered before the call can come: use `expect` first.
        """
        held = self.folder / f"held.{word}"
        wait_until(held.exists, f"a call with {word}", 180)
        try:
            yield
        finally:
            held.unlink()

    def expect(self, word: str) -> None:
        """The next call with this word is to wait for `hold`."""
        (self.folder / f"hold.{word}").touch()
