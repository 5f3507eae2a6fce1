"""Commands that the pages show beside an example of their output: each is carried out here, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import KEMPNER, ROOT, Run
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.timeout(600)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ELSEWHERE = {
    "kempner compare runs/one runs/other": "tests/distributed/insight/test_replay_of_a_run.py",
    "pip install 'kempner[hf]'": "pyproject.toml",
    'kempner download meta-llama/Llama-3.2-1B --output-dir models/Llama-3.2-1B --ignore-patterns "'
    'original/*"': "tests/unit/cli/test_download_command.py",
    "kempner checkpoint import --from-hf models/Llama-3.2-1B --into runs/next": "tests/unit/"
    "checkpoint/convert/test_import_hugging_face.py",
    "kempner checkpoint import models/Llama-3.2-1B --into runs/next": "tests/unit/checkpoint/"
    "convert/test_import_hugging_face.py",
    "kempner checkpoint import models/Llama-3.2-1B --into runs/tuned": "tests/unit/checkpoint/"
    "convert/test_import_hugging_face.py",
    "kempner train tuned.toml": "tests/distributed/stops/test_adapter_runs.py",
    "kempner checkpoint import models/Llama-3.2-1B --into runs/preferring": "tests/unit/checkpoint/"
    "convert/test_import_hugging_face.py",
    "kempner train preferring.toml": "tests/distributed/stops/test_preference_runs.py",
    "kempner checkpoint export runs/tuned --to-hf exports/tuned --base models/Llama-3.2-1B": ""
    "tests/unit/checkpoint/convert/test_adapter_export.py",
    "kempner checkpoint export runs/tuned --to-hf exports/whole --merge": "tests/unit/checkpoint/"
    "convert/test_adapter_export.py",
    "kempner checkpoint push runs/debug ours/debug --private": "tests/unit/cli/"
    "test_push_command.py",
    "kempner checkpoint import stock --into runs/other --step 5 --cursor 40": "tests/distributed/"
    "saves/test_checkpoint_exchange.py",
}
"""What needs a network, a published model or another program's checkpoint, and who has those."""

ENDS = {
    "kempner checkpoint verify runs/debug 20 40": 65,  # one is damaged
    "kempner compare runs/debug exports/edited": 1,
}
"""Exit codes other than 0."""


def shown(page: Path) -> list[str]:
    blocks = [text for language, text in _BLOCK.findall(page.read_text()) if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


COMMANDS = [command for page in sorted((ROOT / "docs").glob("*.md")) for command in shown(page)]


def test_every_command_that_is_shown_does_what_it_should(run: Run, tmp_path: Path) -> None:
    """On a run with four checkpoints, of which one is damaged."""
    saved = ("--train.max_steps=40", "--checkpoint.interval=10", "--checkpoint.keep_last=9")
    run.complete(2, *saved)
    (damaged,) = run.checkpoints.glob("step-00000020/__1_0.distcp")
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    folder = tmp_path / "reader"
    (folder / "runs").mkdir(parents=True)
    for name in ("debug", "mine"):
        (folder / "runs" / name).symlink_to(run.record.path)
    (folder / "bin").mkdir()
    starter = folder / "bin" / "kempner"
    starter.write_text("#!/bin/sh\nexec " + " ".join(f'"{word}"' for word in KEMPNER) + ' "$@"\n')
    starter.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    for command in COMMANDS:
        if command in ELSEWHERE:
            continue
        if command.endswith("exports/edited"):
            edit(folder / "exports")
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ENDS.get(command, 0), (command, done.stdout, done.stderr)


def edit(exports: Path) -> None:
    """Another value in one tensor of what was exported."""
    shutil.copytree(exports / "debug", exports / "edited")
    file = exports / "edited" / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[7] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def test_what_is_left_to_others_is_there() -> None:
    assert sorted(ELSEWHERE.keys() - COMMANDS) == []
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []
