"""A rank that prints without end fills no disk, and what it prints last is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.supervisor.daemon import Bounds, OutputLimit, before, cut

SMALL = Bounds(head=1000, tail=2000, most=5000)


@pytest.mark.parametrize("size", [1000, 1001, 2999, 3000, 5001, 3_000_000])
def test_the_first_and_the_last_are_kept(tmp_path: Path, size: int) -> None:
    path, written = tmp_path / "rank-00001.out", bytes(i % 251 for i in range(size))
    path.write_bytes(written)
    with path.open("ab", buffering=0) as rank:
        cut(path, SMALL)
        rank.write(b"what comes next")
    head, told, rest = path.read_bytes().partition(b"\n[kempner: output was left out here")
    assert (head, told != b"") == (written[:1000], True)
    assert rest.endswith(b"]\nwhat comes next")
    assert before(path).read_bytes() == written[1000:][-2000:]


FLOOD = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
line = b"x" * 3999 + b"\\n"
out = open(sys.argv[2], "ab", buffering=0)
while time.monotonic() < end:
    out.write(line)
out.write(b"the last words\\n")
"""


def test_a_flood_is_bounded_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kempner.supervisor.daemon.EVERY", 0.02)
    path, quiet = tmp_path / "rank-00001.out", tmp_path / "rank-00002.out"
    quiet.write_bytes(b"little\n")
    bounds = Bounds(head=1 << 20, tail=1 << 20, most=3 << 20)
    limit = OutputLimit(tmp_path, bounds)
    limit.start()
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(scaled(1.0)), str(path)])
    wait_until(lambda: before(path).exists(), "the first cut")
    assert flood.wait(scaled(30)) == 0
    limit.close()
    assert path.stat().st_size <= bounds.most
    assert before(path).stat().st_size <= bounds.tail
    # The last cut may have come after them.
    assert b"the last words\n" in before(path).read_bytes() + path.read_bytes()
    assert quiet.read_bytes() == b"little\n"
