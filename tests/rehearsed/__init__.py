"""The exam of `kempner rehearse`: programs with a planted mistake, and programs without any.

Each was written before the command was, but for `gathered.py`: it stands for one whose gradients
survive() holds by now, and which is among the sound ones. A program with a mistake says by
`# expect: WORD|WORD` what the report must name; `# nproc: 2` asks for two ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kempner.rehearse.rehearsal import Rehearsal, Stage
from kempner.rehearse.report import report
from kempner.run.process.exit_codes import ExitCode, UsageError

HERE = Path(__file__).parent
MISTAKES = sorted((HERE / "mistakes").glob("*/*.py"))
SOUND = sorted((HERE / "sound").glob("*/*.py"))


@dataclass(frozen=True)
class Outcome:
    """What a rehearsal said of a program."""

    text: str
    code: ExitCode
    expected: str

    @property
    def passed(self) -> bool:
        """Whether the mistake is named, or what has none is called exact."""
        if not self.expected:
            return self.code is ExitCode.COMPLETED
        said = re.search(self.expected, self.text) is not None
        return said and self.code is not ExitCode.COMPLETED


def rehearse(program: Path, folder: Path, stage: Stage) -> Outcome:
    """Rehearse a program in an empty folder."""
    text = program.read_text()
    expected = re.search(r"^# expect: (.*)$", text, re.MULTILINE)
    nproc = re.search(r"^# nproc: (\d+)$", text, re.MULTILINE)
    size = int(nproc[1]) if nproc else 1
    scratch = folder / "runs" / "rehearsal"
    scratch.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        command = (sys.executable, str(program))
        seen = Rehearsal(command, 20, size, scratch, stage, lambda _: None).run()
        told, code = report(seen, size)
    except UsageError as error:
        told, code = str(error), error.code
    finally:
        os.chdir(before)
        shutil.rmtree(scratch)
    return Outcome(told, code, expected[1] if expected else "")
