"""Preparing text: what comes out, what is refused, and that it is the same however it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kempner.data.files.index import read_index
from kempner.data.files.token_file import Corpus, verify
from kempner.data.prepare import sources
from kempner.data.prepare.pipeline import prepare
from kempner.run.process.exit_codes import CannotWriteError, DataError, RunError, UsageError

EOT = 256


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_UNIT", 100)


def stream(out: Path) -> list[int]:
    corpus = Corpus.open(out)
    return [int(token) for token in corpus.read(0, corpus.index.tokens)]


def encoded(*documents: bytes) -> list[int]:
    return [token for document in documents for token in [*document, EOT]]


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_text_file_is_one_document_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff")
    prepared = prepare(tmp_path / "out", [tmp_path / "a.txt"])
    assert stream(tmp_path / "out") == encoded(b"one\ntwo\n\xff")
    index = prepared.index
    assert (index.dtype, index.vocab_size, index.eot) == ("uint16", 257, EOT)
    assert (index.tokens, index.documents) == (10, 1)
    assert (prepared.kept, prepared.found.left_out, prepared.was_finished) == (0, (), False)
    assert sorted(tree(tmp_path / "out")) == ["index.json", "shard-00000.tokens"]
    assert verify(tmp_path / "out") == read_index(tmp_path / "out") == index


def test_a_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": "né\n", "id": 1}, {"text": "two"})
    file.write_text(file.read_text() + "\n  \n" + '{"text": "last, without a line end"}')
    prepare(tmp_path / "out", [file])
    expected = encoded("né\n".encode(), b"two", b"last, without a line end")
    assert stream(tmp_path / "out") == expected


def test_the_text_may_be_under_another_key(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    prepare(tmp_path / "out", [file], text_key="body")
    assert stream(tmp_path / "out") == encoded(b"yes")


def test_a_folder_gives_its_text_files_sorted_and_says_what_it_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for name in ("b/1.txt", "a.txt", "b.md", "c.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) if "json" in name else name)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "link").symlink_to(folder / "b")
    prepared = prepare(tmp_path / "out", [folder])
    assert stream(tmp_path / "out") == encoded(b"a.txt", b"b.md", b"b/1.txt", b"c.jsonl")
    assert prepared.found.left_out == (folder / "link", folder / "picture.png")


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    file = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": "x"})
    index = prepare(tmp_path / "out", [tmp_path / "empty.txt", file]).index
    assert stream(tmp_path / "out") == encoded(b"x")
    assert (index.documents, index.shards[0].empty_documents) == (1, 2)


@pytest.mark.usefixtures("small_units")
def test_many_small_files_share_a_shard_and_large_ones_are_cut(tmp_path: Path) -> None:
    small = []
    for number in range(30):
        small.append(tmp_path / f"{number:02}.txt")
        small[-1].write_bytes(b"%02d" % number)
    large = tmp_path / "large.txt"
    large.write_bytes(bytes(range(1, 256)) * 2)
    lines = [{"text": f"line {number:03}"} for number in range(40)]
    index = prepare(
        tmp_path / "out", [*small, large, write_lines(tmp_path / "l.jsonl", *lines)]
    ).index
    assert stream(tmp_path / "out") == encoded(
        *(b"%02d" % number for number in range(30)),
        bytes(range(1, 256)) * 2,
        *(line["text"].encode() for line in lines),
    )
    assert index.documents == 71
    assert index.shards[0].source.files == 30
    assert 12 <= len(index.shards) <= 20


@pytest.mark.usefixtures("small_units")
def test_the_cut_of_jsonl_never_splits_a_line(tmp_path: Path) -> None:
    lengths = [1, 300, 2, 85, 86, 87, 88, 0, 500, 3]
    texts = ["x" * length for length in lengths]
    file = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    prepare(tmp_path / "out", [file])
    assert stream(tmp_path / "out") == encoded(*(text.encode() for text in texts if text))


@pytest.mark.usefixtures("small_units")
def test_the_number_of_workers_does_not_show(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 251)) * 3)
    file = write_lines(tmp_path / "b.jsonl", *({"text": "y" * n} for n in range(60)))
    for workers in (1, 2):
        prepare(tmp_path / f"out{workers}", [tmp_path / "a.txt", file], workers=workers)
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2")


def test_progress_is_told_in_bytes(tmp_path: Path, small_units: None) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 250)
    told: list[tuple[int, int]] = []
    prepare(tmp_path / "out", [tmp_path / "a.txt"], on_progress=lambda *counts: told.append(counts))
    assert sorted(set(told)) == [(0, 250), (100, 250), (200, 250), (250, 250)]
    assert told == sorted(told)


def test_a_finished_directory_is_verified_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    first = prepare(tmp_path / "out", [tmp_path / "a.txt"])
    shard = tmp_path / "out" / "shard-00000.tokens"
    before = shard.stat()
    again = prepare(tmp_path / "out", [tmp_path / "a.txt"])
    assert (again.index, again.kept, again.was_finished) == (first.index, 1, True)
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00000\.tokens is damaged"):
        prepare(tmp_path / "out", [tmp_path / "a.txt"])


@pytest.mark.parametrize("change", ["content", "length", "other file"])
@pytest.mark.usefixtures("small_units")
def test_other_text_does_not_go_into_a_finished_directory(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text" * 50)
    prepare(tmp_path / "out", [file])
    before = tree(tmp_path / "out")
    if change == "other file":
        file = tmp_path / "b.txt"
    file.write_text("text" * 500 if change == "length" else "taxt" * 50)
    with pytest.raises(UsageError, match=r"prepared from other text.*another --out, or remove"):
        prepare(tmp_path / "out", [file])
    assert tree(tmp_path / "out") == before


def unfinished(out: Path, files: list[Path]) -> None:
    """As it is when the first shard has been made."""

    def stop(done: int, total: int) -> None:
        if (out / ".progress" / "shard-00000.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(out, files, on_progress=stop)
    assert (out / "shard-00000.tokens").exists()
    assert not (out / "index.json").exists()


@pytest.mark.usefixtures("small_units")
def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 251)))
    prepare(tmp_path / "whole", [file])
    unfinished(tmp_path / "out", [file])
    inode = (tmp_path / "out" / "shard-00000.tokens").stat().st_ino
    assert prepare(tmp_path / "out", [file]).kept == 1
    assert (tmp_path / "out" / "shard-00000.tokens").stat().st_ino == inode
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def change_text(file: Path, out: Path) -> None:
    file.write_bytes(bytes(range(2, 252)))


def shorten_text(file: Path, out: Path) -> None:
    file.write_bytes(b"x" * 90)


def damage_shard(file: Path, out: Path) -> None:
    content = bytearray((out / "shard-00000.tokens").read_bytes())
    content[70] ^= 1
    (out / "shard-00000.tokens").write_bytes(content)


def lose_shard(file: Path, out: Path) -> None:
    (out / "shard-00000.tokens").unlink()


def tear_record(file: Path, out: Path) -> None:
    (out / ".progress" / "shard-00000.json").write_text('{"tokenizer"')


@pytest.mark.parametrize(
    "happen", [change_text, shorten_text, damage_shard, lose_shard, tear_record]
)
@pytest.mark.usefixtures("small_units")
def test_what_no_longer_fits_is_made_again(
    tmp_path: Path, happen: Callable[[Path, Path], None]
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 251)))
    unfinished(tmp_path / "out", [file])
    happen(file, tmp_path / "out")
    assert prepare(tmp_path / "out", [file]).kept == 0
    prepare(tmp_path / "whole", [file])
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_units")
def test_shards_of_a_longer_text_do_not_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 350)
    unfinished(tmp_path / "out", [file])
    (tmp_path / "out" / "shard-00003.tokens").write_bytes(b"of the longer text")
    file.write_bytes(b"x" * 50)
    prepare(tmp_path / "out", [file])
    assert sorted(tree(tmp_path / "out")) == ["index.json", "shard-00000.tokens"]


@pytest.mark.usefixtures("small_units")
def test_other_files_do_not_go_into_an_unfinished_directory(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"x" * 250)
    unfinished(tmp_path / "out", [tmp_path / "a.txt"])
    with pytest.raises(UsageError, match=r"unfinished preparation of other files.*a\.txt"):
        prepare(tmp_path / "out", [tmp_path / "b.txt"])


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=r"is not empty: choose a new directory"):
        prepare(tmp_path, [tmp_path / "a.txt"])
    with pytest.raises(UsageError, match=r"a\.txt cannot be written: (File exists|Not a dir)"):
        prepare(tmp_path / "a.txt", [tmp_path / "a.txt"])
    with pytest.raises(UsageError, match=r"a\.txt/out cannot be written: Not a directory"):
        prepare(tmp_path / "a.txt" / "out", [tmp_path / "a.txt"])


@pytest.mark.parametrize(
    ("name", "content", "error", "complaint"),
    [
        ("missing.txt", None, UsageError, r"missing\.txt does not exist"),
        ("empty.txt", b"", UsageError, r"no text in .*empty\.txt"),
        ("a.jsonl", b"\n \n", DataError, r"nothing to prepare"),
        ("a.gz", b"\x1f\x8b", UsageError, r"a\.gz cannot be unpacked: it is damaged"),
        ("a.tar.gz", b"\x1f\x8b", UsageError, r"a\.tar\.gz is not plain text: unpack"),
        ("a.csv", b"text\nx\n", UsageError, r"a\.csv is a table: write .* a \.jsonl file"),
        ("a.json", b"[]", UsageError, r"a\.json may be one JSON document: make it a \.jsonl"),
        ("program", b"\x7fELF\0", UsageError, r"program is binary \(its byte 5 is zero\)"),
        ("a.txt", "x".encode("utf-16"), UsageError, r"a\.txt is UTF-16: convert it to UTF-8"),
        ("a.pdf", b"%PDF-1.7\n", UsageError, r"a\.pdf is a PDF: convert it to text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', DataError, r"a\.jsonl:2: the line is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n\xff\n', DataError, r"a\.jsonl:3: the line is not UTF-8"),
        ("a.jsonl", b"[1]\n", DataError, r"a\.jsonl:1: the line is a JSON list, not an object"),
        ("a.jsonl", b'{"body": "x"}', DataError, r'a\.jsonl:1: .*no key "text" \(it has: body\)'),
        ("a.jsonl", b'{"text": 1}', DataError, r'a\.jsonl:1: the value of "text" is not a string'),
        ("a.jsonl", b'{"text": "\\ud800"}', DataError, r"a\.jsonl:1: .*half a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, DataError, r"a\.jsonl:1: the line is nested too deeply"),
    ],
)
def test_unusable_text_is_refused(
    tmp_path: Path, name: str, content: bytes | None, error: type[RunError], complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=complaint):
        prepare(tmp_path / "out", [tmp_path / name])


@pytest.mark.usefixtures("small_units")
def test_a_bad_line_of_a_later_piece_is_counted_from_the_start(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *({"text": "x" * 30} for _ in range(20)), "bad")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl:21: the line is a JSON str"):
            prepare(tmp_path / "out", [file], workers=workers)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(UsageError, match=r"contains no text file \(\.jsonl, .*\.txt, or these"):
        prepare(tmp_path / "out", [tmp_path])


def test_a_full_disk_is_one_sentence_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kempner.data.files.token_file.os.fsync", fail)
        patch.setattr("kempner.data.prepare.pipeline.put", lambda recipe, final, content: None)
        with pytest.raises(CannotWriteError, match=r"cannot be written: No space left on device"):
            prepare(tmp_path / "out", [tmp_path / "a.txt"])
    assert not list((tmp_path / "out").glob("shard*"))
    prepare(tmp_path / "out", [tmp_path / "a.txt"])
    assert stream(tmp_path / "out") == encoded(b"text")


def test_text_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    plan = sources.plan_units

    def grow(*args: object, **kwargs: object) -> object:
        file.write_text("longer text")
        return plan(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("kempner.data.prepare.pipeline.plan_units", grow)
    with pytest.raises(DataError, match=r"a\.txt changed while it was being prepared"):
        prepare(tmp_path / "out", [file])
