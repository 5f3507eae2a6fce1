"""The demo's corpus: which texts, cut how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "demo"))
import corpus as demo

LONG = "A sentence that is long enough to be taken, whichever way one looks at it. " * 2
OTHER = "Another sentence of which no reader could say that it is too short to be used. " * 2


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of five modules."""
    sources = {
        "beta.py": f'raise SystemExit("imported")\ndef f():\n    """{OTHER}"""\n',
        "alpha.py": f'"""{LONG}"""\nclass C:\n    def m(self):\n        """Short."""\n'
        f'    async def n(self):\n        """{LONG}"""\n',
        "pack/gamma.py": f'def g():\n    """{LONG}"""\ndef h():\n    r"""\\d {OTHER}"""\n',
        "test/delta.py": f'"""Never seen. {LONG}"""\n',
        "empty.py": "",
    }
    for name, source in sources.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "library"


def modules(library: Path) -> dict[str, str]:
    return {d.name: d.text for d in demo.documents(library) if d.name.startswith("module.")}


def test_long_docstrings_are_taken_once_in_order_of_names(library: Path) -> None:
    taken = modules(library)
    assert list(taken) == ["module.alpha", "module.beta", "module.pack.gamma"]
    assert taken["module.alpha"] == LONG.strip() + "\n"
    assert taken["module.beta"] == OTHER.strip() + "\n"
    assert taken["module.pack.gamma"] == f"\\d {OTHER.strip()}\n"


def test_docstrings_follow_the_source(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        f'"""{LONG}"""\nclass A:\n    def f(self):\n        """{OTHER}"""\n'
        f'def z():\n    """Last. {LONG}"""\n'
    )
    assert [text[:5] for text in demo.docstrings(path)] == ["A sen", "Anoth", "Last."]


def test_every_document_goes_to_one_folder_and_always_the_same(
    library: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    sizes = demo.write(first, library)
    (second / "train").mkdir(parents=True)
    (second / "train" / "stale.txt").write_text("from another Python")
    demo.write(second, library)
    written = {p.relative_to(first): p.read_bytes() for p in sorted(first.rglob("*.txt"))}
    assert written == {p.relative_to(second): p.read_bytes() for p in second.rglob("*.txt")}
    names = [path.stem for path in written]
    assert sorted(names) == sorted(d.name for d in demo.documents(library))
    for folder, (count, size) in sizes.items():
        contents = [value for path, value in written.items() if path.parts[0] == folder]
        assert (count, size) == (len(contents), sum(map(len, contents)))


def test_one_document_in_twenty_is_held_out() -> None:
    held_out = sum(demo.Document(f"module.m{i}", "").held_out for i in range(4000))
    assert 150 < held_out < 250


def test_the_real_library_is_a_real_corpus(tmp_path: Path) -> None:
    topics = [d for d in demo.documents(tmp_path) if d.name.startswith("topic.")]
    assert sum(len(d.text) for d in topics) > 300_000
    assert any(d.held_out for d in topics)
