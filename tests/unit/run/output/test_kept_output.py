"""What a process prints is kept by its head and its tail, without secrets, for its owner alone."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from kempner.run.output.logs import masking
from kempner.run.output.writers import KeptOutput, OutputBounds, settle_all

SMALL = OutputBounds(head=1000, tail=300)
TOLD: list[tuple[str, Mapping[str, object]]] = []


def kept(path: Path, bounds: OutputBounds = SMALL, **environ: str) -> KeptOutput:
    return KeptOutput(
        path, lambda said, facts: TOLD.append((said, facts)), masking(environ), bounds
    )


def end(output: KeptOutput) -> None:
    output.close()
    output.prompt()  # as the end of a process does it that is in a hurry
    settle_all(5.0)


@pytest.mark.parametrize("piece", [1, 7, 50, 4096])
def test_head_and_tail_and_the_bytes_between(tmp_path: Path, piece: int) -> None:
    path, said = tmp_path / "out", b"".join(b"line %06d\n" % n for n in range(3000))
    output = kept(path)
    for at in range(0, len(said), piece * 11):
        output.add(said[at : at + piece * 11])
    end(output)
    head, _, rest = path.read_bytes().partition(b"\n[kempner: ")
    number, _, tail = rest.partition(b" bytes are left out here]\n")
    assert said.startswith(head)
    assert said.endswith(tail)
    assert len(head) + int(number.replace(b",", b"")) + len(tail) == len(said)
    assert len(head) > 900
    assert len(tail) == SMALL.tail
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path) not in {file.path for file in psutil.Process().open_files()}


def test_secrets_are_masked_wherever_a_piece_ends(tmp_path: Path) -> None:
    secret, token = "correct-horse", "hf_abcdefghijklmnopqrstuvwxyz"
    text = f"key {secret} and {token}, ftp://me:word@host, max_tokens=5\nno end {secret}".encode()
    for cut in range(len(text)):
        path = tmp_path / str(cut)
        output = kept(path, WANDB_API_KEY=secret, MAX_TOKENS="no end at all")
        output.add(text[:cut])
        output.add(text[cut:])
        end(output)
        assert path.read_text() == "key *** and ***, ftp://me:***@host, max_tokens=5\nno end ***"


def test_a_file_that_cannot_be_written_costs_neither_memory_nor_the_end(tmp_path: Path) -> None:
    TOLD.clear()
    folder = tmp_path / "away"
    output = kept(folder / "out")
    for number in range(2000):
        output.add(b"line %06d\n" % number)
    assert len(TOLD) == 1
    assert TOLD[0][1]["error"] == "No such file or directory"
    folder.mkdir()
    output.add(b"the last\n")
    end(output)
    said = (folder / "out").read_text()
    assert said.endswith("line 001999\nthe last\n")
    assert "bytes are left out here" in said
    assert len(said) < 2 * SMALL.tail
