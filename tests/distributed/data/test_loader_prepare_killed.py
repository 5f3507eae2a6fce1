"""Preparing is killed, at every step that changes a directory and from outside, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tokenizers
from patience import scaled

from kempner.data.files.token_file import verify

# Forks a child for every point: it kills itself there. Another one goes on from what is left.
KILLED_EVERYWHERE = """
import os, signal, sys
from pathlib import Path
from kempner.data.prepare import sources
from kempner.data.prepare.pipeline import prepare
from kempner.data.files.token_file import TokenWriter

sources._UNIT = 100
out, reference, text = map(Path, sys.argv[1:])
CALLS = ("fsync", "replace", "unlink", "mkdir", "rmdir")


def tree(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def kill_at(point):
    seen = 0

    def counted(call):
        def wrapper(*args, **kwargs):
            nonlocal seen
            for act in (lambda: None, lambda: call(*args, **kwargs)):
                act()
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)
        return wrapper

    os.fsync = lambda descriptor: None  # what was written outlives the process anyway
    TokenWriter.append = counted(TokenWriter.append)
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def in_child(point):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    if point:
        kill_at(point)
    prepare(out, [text])
    os._exit(0)


out, whole = reference, out
assert in_child(0) == 0
expected = tree(reference)
out, point = whole, 1
while status := in_child(point):
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
    left = tree(out) if out.exists() else {}
    for name, content in left.items():
        if name.endswith(".tokens") or name == "index.json":
            assert content == expected[name], (point, name)
    assert in_child(0) == 0, point
    assert tree(out) == expected, point
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    point += 1
assert tree(out) == expected
print(point)
"""

FROM_OUTSIDE = """
import sys
from kempner.cli import prepare
from kempner.data.prepare import sources

if __name__ == "__main__":
    sources._UNIT = 20_000
    sys.exit(prepare.app(standalone_mode=False))
"""


OPTIONS = ["--workers", "2", "--tokenizer", "tokenizer.json"]


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_killed_at_every_point_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(bytes(range(1, 251)))
    result = subprocess.run(
        [sys.executable, "-c", KILLED_EVERYWHERE, tmp_path / "out", tmp_path / "whole", text],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 50


class Preparation:
    """One with two workers, far from done when its first shard is in place."""

    def __init__(self, folder: Path) -> None:
        vocabulary = {chr(code): code for code in range(256)} | {"<eos>": 256}
        model = tokenizers.models.BPE(vocabulary, [])
        tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
        (folder / "run.py").write_text(FROM_OUTSIDE)
        lines = '{"text": "%s"}\n' % ("some text " * 500)
        (folder / "a.jsonl").write_text(lines * 300)
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, out: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "run.py", "a.jsonl", "--out", out, *OPTIONS],
            cwd=self.folder,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test that was itself started in the background ignores it, and so would a child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def wait_for_first(self, out: str) -> None:
        deadline = time.monotonic() + scaled(60)
        while not list((self.folder / out / ".progress").glob("shard-*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Preparation]:
    preparation = Preparation(tmp_path)
    yield preparation
    for process in preparation.started:  # what a failed test leaves
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_from_outside_it_leaves_no_process_and_goes_on(
    run: Preparation, tmp_path: Path, number: signal.Signals
) -> None:
    process = run.start("out")
    run.wait_for_first("out")
    children = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGKILL:
        process.kill()  # it alone: its workers must notice
    else:
        os.killpg(process.pid, number)  # as a terminal does: its workers must not mind
    _, errors = process.communicate(timeout=scaled(60))
    assert not psutil.wait_procs(children, timeout=scaled(30))[1]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert errors.splitlines()[-1].startswith("kempner: interrupted; finished files are kept")
        assert "Traceback" not in errors
    assert not (tmp_path / "out" / "index.json").exists()
    left = tree(tmp_path / "out")

    again = run.start("out")
    assert "kept from before" in again.communicate(timeout=scaled(60))[0]
    assert again.returncode == 0
    run.start("whole").communicate(timeout=scaled(60))
    whole = tree(tmp_path / "whole")
    assert tree(tmp_path / "out") == whole
    assert {name: left[name] for name in left if name.endswith(".tokens")}.items() <= whole.items()
    verify(tmp_path / "out")
