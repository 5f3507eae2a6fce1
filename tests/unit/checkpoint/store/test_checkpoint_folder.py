"""The checkpoint folder without torch: names, manifest, commit, verification, retention."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Identity,
    Manifest,
    Origin,
    Rollback,
    TrainState,
    decode,
    encode,
    encode_sidecar,
    read,
    sidecar_name,
    sum_file,
    whole_sum,
)
from kempner.checkpoint.format.names import (
    METADATA,
    CheckpointFolder,
    in_progress_name,
    parse_step,
    step_name,
)
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.store import commit, retention
from kempner.checkpoint.store.retention import Readers
from kempner.checkpoint.store.selection import (
    MissingError,
    choose,
    choose_to_go_back,
    compare_identities,
    left_behind,
    newest,
    refuse_if_missing,
)
from kempner.run.process.durable_io import FileSystem, append_line, probe_file_system
from kempner.run.process.exit_codes import DataError
from kempner.run.record.attempts import Fence, SupersededError, begin_attempt
from kempner.run.record.run_dir import RunDirectory

IDENTITY = Identity(
    world=2,
    mesh={"fsdp": 2},
    seed=7,
    data_fingerprint="d1",
    model={"dim": 64, "n_layers": 2},
    origin=Origin(config_hash="c1", host={"threads": 1}, versions={"torch": "2"}),
)


@dataclasses.dataclass
class Store:
    """A run with checkpoints made of plain files."""

    run: RunDirectory
    fence: Fence
    reports: list[str]

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.run.checkpoints)

    def write(self, step: int) -> tuple[Path, Manifest]:
        attempt = self.fence.attempt
        path = self.folder.path / in_progress_name(step, attempt.number, attempt.nonce)
        path.mkdir(parents=True)
        data = path / "__0_0.distcp"
        data.write_bytes(random.Random(step).randbytes(2 * BLOCK_BYTES + 17))
        sidecar = encode_sidecar({data.name: sum_file(data)})
        files = {data.name: FileEntry(bytes=data.stat().st_size, sums=sidecar_name(0))}
        for name, content in {sidecar_name(0): sidecar, METADATA: b"contents"}.items():
            (path / name).write_bytes(content)
            files[name] = FileEntry(bytes=len(content), xxh3_128=whole_sum(content))
        train_state = TrainState(step=step, cursor=8 * step, tokens=256 * step)
        return path, Manifest(train_state, IDENTITY, attempt.number, 0.5, files)

    def commit(self, step: int) -> Path:
        path, manifest = self.write(step)
        return commit.commit(self.folder, path, manifest, self.fence, self.reports.append)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    run = RunDirectory(tmp_path / "run")
    return Store(run, Fence(run.attempts, begin_attempt(run)), [])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000120", 120),
        ("step-100000000", 100_000_000),
        ("step-0000120", None),
        ("step-000000120", None),
        ("step-00000120.abandoned-a4", None),
        ("step-00000120_backup", None),
        (".step-00000120.a3-9f", None),
        ("step-best", None),
        ("/elsewhere/step-00000120", None),
        ("../step-00000120", None),
        ("latest", None),
    ],
)
def test_names_that_are_ours(name: str, step: int | None) -> None:
    assert parse_step(name) == step
    assert step is None or step_name(step) == name


def test_commit_makes_a_checkpoint_that_verifies_and_is_latest(store: Store) -> None:
    path = store.commit(120)
    assert path.name == "step-00000120"
    assert store.folder.latest() == 120
    assert verify(path) == []
    assert read(path).train_state == TrainState(120, 960, 30720)
    assert read(path).identity == IDENTITY
    assert sorted(p.name for p in store.folder.path.iterdir()) == ["latest", "step-00000120"]


def test_a_manifest_keeps_losses_and_rollbacks_and_need_not_have_them(store: Store) -> None:
    path, manifest = store.write(120)
    rollbacks = (Rollback(at=57, to=50, start=400, end=456), Rollback(66, 40, 320, 528))
    told = dataclasses.replace(manifest.train_state, losses=(3.25, 0.1), rollbacks=rollbacks)
    assert decode(encode(dataclasses.replace(manifest, train_state=told)), path).train_state == told
    fields = json.loads(encode(manifest))
    for later in ("losses", "rollbacks", "checksum"):
        del fields[later]
    old = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    signed = json.dumps(fields | {"checksum": whole_sum(old)}, sort_keys=True, indent=2) + "\n"
    assert decode(signed.encode(), path).train_state == manifest.train_state


def test_a_step_reached_again_sets_the_earlier_checkpoint_aside(store: Store) -> None:
    first = store.commit(10)
    inode = first.stat().st_ino
    store.commit(10)
    store.commit(10)
    names = sorted(p.name for p in store.folder.path.glob("step-*"))
    assert names == ["step-00000010", "step-00000010.abandoned-a1", "step-00000010.abandoned-a1.2"]
    assert (store.folder.path / names[1]).stat().st_ino == inode
    assert all(verify(store.folder.path / name) == [] for name in names)
    assert len(store.reports) == 2
    assert "step 10 was committed before" in store.reports[0]


def test_what_an_abandoned_branch_left_never_joins_the_live_one(store: Store) -> None:
    for step in (10, 20, 30):
        store.commit(step)
    commit.go_on_from(store.folder, 10, store.fence, store.reports.append)
    assert store.folder.committed() == [store.folder.latest()] == [10]
    store.commit(25)  # a stop, say: no step of the branch that was left
    store.commit(35)
    assert store.folder.committed() == [10, 25, 35]
    names = {p.name for p in store.folder.path.glob("*.abandoned-*")}
    assert names == {"step-00000020.abandoned-a1", "step-00000030.abandoned-a1"}


@pytest.mark.parametrize(
    ("latest", "step", "left"),
    [(None, 40, [10, 20, 30]), (None, 20, [10, 20]), (10, 25, [20]), (30, 40, []), (30, 30, [30])],
)
def test_what_latest_does_not_reach_is_left_behind(
    latest: int | None, step: int, left: list[int]
) -> None:
    assert left_behind([10, 20, 30], latest, step) == left


def test_what_is_not_seen_here_is_not_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has written it, into another folder of the same name."""
    store.commit(10)
    path, manifest = store.write(20)
    (path / sidecar_name(0)).unlink()
    with pytest.raises(FileNotFoundError, match=r"written sums-00000.json, but rank 0 does not"):
        commit.await_files(path, manifest.files, seconds=0.0)
    monkeypatch.setattr(commit, "await_files", partial(commit.await_files, seconds=0.0))
    with pytest.raises(FileNotFoundError, match="on a file system that all nodes share"):
        commit.commit(store.folder, path, manifest, store.fence, store.reports.append)
    assert store.folder.committed() == [10]
    assert not (path / "manifest.json").exists()


def test_a_superseded_attempt_commits_nothing(store: Store) -> None:
    store.commit(10)
    path, manifest = store.write(20)
    begin_attempt(store.run)
    with pytest.raises(SupersededError):
        commit.commit(store.folder, path, manifest, store.fence, store.reports.append)
    assert store.folder.committed() == [10]
    assert store.folder.latest() == 10


def test_an_attempt_superseded_between_rename_and_swap_leaves_latest_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(10)
    path, manifest = store.write(20)
    rename = Path.rename

    def rename_then_supersede(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        monkeypatch.undo()
        begin_attempt(store.run)
        return renamed

    monkeypatch.setattr(Path, "rename", rename_then_supersede)
    with pytest.raises(SupersededError):
        commit.commit(store.folder, path, manifest, store.fence, store.reports.append)
    assert store.folder.latest() == 10


def test_a_rename_whose_answer_was_lost_is_not_a_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system: the request is repeated, and the second finds nothing to do."""
    rename = Path.rename

    def twice(self: Path, target: Path) -> Path:
        rename(self, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", twice)
    assert verify(store.commit(10)) == []
    assert verify(store.commit(10)) == []  # the first is set aside
    assert store.folder.latest() == 10
    assert len(list(store.folder.path.glob("step-*"))) == 2


def test_a_rename_of_what_is_not_there_is_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "await_files", partial(commit.await_files, seconds=0.0))
    store.commit(10)
    path, manifest = store.write(20)
    path.rename(path.with_name("stolen"))
    with pytest.raises(FileNotFoundError):
        commit.commit(store.folder, path, manifest, store.fence, store.reports.append)
    with pytest.raises(FileNotFoundError):
        store.folder.set_aside(20, "damaged", 1)
    assert store.folder.latest() == 10


def test_every_flipped_bit_is_found_and_named(store: Store) -> None:
    path = store.commit(5)
    rng = random.Random(0)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for _ in range(40):
            at = rng.randrange(len(content))
            flipped = bytearray(content)
            flipped[at] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
            damages = verify(path)
            assert damages, f"{file.name} byte {at}"
            if file.name.endswith("distcp"):
                assert f"block {at // BLOCK_BYTES} " in str(damages[0])
                assert file.name in str(damages[0])
        file.write_bytes(content)
    assert verify(path) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp: cannot be read"),
        (lambda path: (path / "sums-00000.json").unlink(), "cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{}"), "not a manifest"),
        (lambda path: (path / "manifest.json").write_bytes(b"\0" * 100), "not a manifest"),
        (lambda path: append_line(path / "manifest.json", ""), "its checksum does not match"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b""), "has 0 bytes instead of"),
        (
            lambda path: (path / "__0_0.distcp").write_bytes(b"\0" * (2 * BLOCK_BYTES + 17)),
            "block 0",
        ),
    ],
)
def test_missing_truncated_and_zeroed_files_are_found(
    store: Store, damage: Callable[[Path], object], words: str
) -> None:
    path = store.commit(5)
    damage(path)
    assert any(words in str(found) for found in verify(path))


def test_a_manifest_naming_files_elsewhere_is_refused(store: Store) -> None:
    _, manifest = store.write(3)
    hostile = dataclasses.replace(manifest, files={"../../etc/passwd": FileEntry(1, xxh3_128="0")})
    with pytest.raises(DataError, match="not a file of this folder"):
        decode(encode(hostile), Path("manifest.json"))


def test_a_manifest_of_a_later_format_says_so(store: Store) -> None:
    _, manifest = store.write(3)
    fields = json.loads(encode(manifest)) | {"format": 2}
    del fields["checksum"]
    canonical = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    fields["checksum"] = whole_sum(canonical)
    later = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    with pytest.raises(DataError, match="has format 2, this kempner reads format 1"):
        decode(later, Path("manifest.json"))


@pytest.mark.parametrize(
    ("committed", "latest", "chosen"),
    [
        ([], None, None),
        ([], 10, None),
        ([10, 20], None, 20),
        ([10, 20], 20, 20),
        ([10, 20, 30], 20, 20),
        ([10, 30], 20, 10),
        ([30], 20, 30),
    ],
)
def test_choice(committed: list[int], latest: int | None, chosen: int | None) -> None:
    assert choose(committed, latest) == chosen


def refuse(errors: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap of `latest` fails with each of these, one after the other, then works."""
    rest, rename = list(errors), Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if target.name == "latest" and rest:
            raise OSError(rest.pop(0), "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)


def test_a_swap_that_fails_undoes_no_commit_and_comes_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(10)
    refuse([errno.EIO] * 2, monkeypatch)
    for step in (20, 30):
        store.commit(step)  # each by a folder of its own, as another process would
    assert (store.folder.latest(), newest(store.folder)) == (10, 30)
    assert store.folder.committed() == [10, 20, 30]
    assert ["`latest` cannot name step" in said for said in store.reports] == [True, True]
    store.commit(40)
    assert (store.folder.latest(), newest(store.folder)) == (40, 40)
    assert store.folder.committed() == [10, 20, 30, 40]
    assert store.folder.prepared() == {}


def test_a_commit_that_lands_after_its_attempt_was_superseded_is_not_the_newest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that was stuck in a network file system, from before the fence was asked."""
    store.commit(10)
    path, manifest = store.write(20)
    monkeypatch.setattr(commit, "rename", lambda *rest, **more: None)
    commit.commit(store.folder, path, manifest, store.fence, store.reports.append)
    monkeypatch.undo()
    store.fence = Fence(store.run.attempts, begin_attempt(store.run))
    retention.sweep(CheckpointFolder(store.folder.path), 0)  # it leaves folders in progress here
    commit.go_on_from(store.folder, 10, store.fence, store.reports.append)
    store.commit(15)
    path.rename(store.folder.step(20))
    assert (store.folder.latest(), newest(store.folder)) == (15, 15)
    store.commit(25)
    assert store.folder.committed() == [10, 15, 25]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_links_latest_is_a_file_and_both_are_read(
    store: Store, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(10)

    def refuse(self: Path, target: str) -> None:
        raise OSError(code, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        path = store.commit(20)
    latest = store.folder.path / "latest"
    assert (latest.is_symlink(), latest.read_text(), store.folder.latest()) == (
        False,
        "step-00000020\n",
        20,
    )
    assert retention.locate(latest)[1] == path
    store.commit(30)
    assert (latest.is_symlink(), store.folder.latest()) == (True, 30)
    latest.unlink()
    latest.mkdir()  # as a copy that follows links leaves it
    store.commit(40)
    assert newest(store.folder) == 40


@pytest.mark.parametrize(
    ("branch", "to", "chosen"),
    [([], 20, None), ([10, 20], 20, 20), ([10, 20], 15, 10), ([20, 30], 10, 20)],
)
def test_the_way_back(branch: list[int], to: int, chosen: int | None) -> None:
    assert choose_to_go_back(branch, to) == chosen


def test_what_an_imported_checkpoint_does_not_say_is_remarked_not_refused() -> None:
    imported = Identity(2, {}, None, None, {})
    judgement = compare_identities(imported, IDENTITY, [])
    assert judgement.refusals == ()
    assert [remark.partition(" is ")[0] for remark in judgement.remarks] == [
        "the checkpoint was imported: assuming that its data",
        "the checkpoint was imported: assuming that its seed",
    ]


def test_prune_and_sweep_touch_nothing_foreign(store: Store) -> None:
    for step in (10, 20, 30):
        store.commit(step)
    foreign = ["step-00000010_backup", "step_best", "notes", ".step-00000010.mine", "step-5"]
    for name in foreign:
        (store.folder.path / name).mkdir()
        (store.folder.path / name / "manifest.json").write_text("theirs")
    keep, readers = retention.Keep(last=2), Readers(store.folder)
    assert retention.prune(store.folder, keep, readers, store.fence.check) == {}
    assert store.folder.committed() == [20, 30]
    store.write(40)
    begun = begin_attempt(store.run)
    assert retention.sweep(store.folder, begun.number) == []
    left = sorted(p.name for p in store.folder.path.iterdir())
    assert left == sorted([*foreign, "latest", "step-00000020", "step-00000030"])


def test_sweep_leaves_what_the_living_attempt_writes(store: Store) -> None:
    path, _ = store.write(40)
    assert retention.sweep(store.folder, store.fence.attempt.number) == []
    assert path.is_dir()


@pytest.mark.parametrize("text", ["step-00000099", "/tmp/step-00000010", "../x", "nonsense"])
def test_a_latest_that_dangles_or_points_outside_is_not_followed(store: Store, text: str) -> None:
    store.commit(10)
    (store.folder.path / "latest").unlink()
    (store.folder.path / "latest").symlink_to(text)
    assert choose(store.folder.committed(), store.folder.latest()) == 10


@pytest.mark.parametrize(
    ("change", "accept", "refused", "remarked"),
    [
        ({}, [], "", ""),
        ({"data_fingerprint": "d2"}, [], "data.dataset_path", ""),
        ({"data_fingerprint": "d2"}, ["data"], "", "another data"),
        ({"seed": 8}, ["data"], "train.seed", ""),
        ({"model": {**IDENTITY.model, "qk_norm": True}}, [], "made with the default", ""),
        ({"seed": 8}, ["seed"], "", "another seed"),
        ({"model": {**IDENTITY.model, "dim": 65}}, ["data", "seed"], "model.dim is 65", ""),
        ({"optimizer": "sgd"}, ["data", "seed"], "optimizer.name is 'sgd'", ""),
        ({"world": 3}, [], "", "written by 2 ranks, now there are 3"),
        (
            {"origin": dataclasses.replace(IDENTITY.origin, host={"threads": 2})},
            [],
            "",
            "threads was 1 and is 2",
        ),
        ({"origin": Origin("c2", {"threads": 1}, {"torch": "3"})}, [], "", ""),
    ],
)
def test_what_a_resume_may_change(
    change: dict[str, object], accept: list[str], refused: str, remarked: str
) -> None:
    now = dataclasses.replace(IDENTITY, **change)  # type: ignore[arg-type]
    judgement = compare_identities(IDENTITY, now, accept)
    assert bool(judgement.refusals) == bool(refused)
    assert bool(judgement.remarks) == bool(remarked)
    assert refused in " ".join(judgement.refusals)
    assert remarked in " ".join(judgement.remarks)


def test_was_here_and_is_gone_is_never_nothing_here(store: Store) -> None:
    refuse_if_missing(store.folder, None)
    with pytest.raises(MissingError, match="ledger says that step 40 was committed") as bare:
        refuse_if_missing(store.folder, 40)
    assert bare.value.errno == errno.ENOENT  # a file system that is not mounted looks like that
    path = store.commit(40)
    refuse_if_missing(store.folder, 40)
    for file in path.iterdir():
        file.unlink()
    (store.folder.path / "latest").unlink()
    with pytest.raises(MissingError, match=r"start under another run\.name") as purged:
        refuse_if_missing(store.folder, 40)
    assert purged.value.errno == errno.ENODATA
    store.folder.set_aside(40, "damaged", 2)
    with pytest.raises(DataError, match="those there were are set aside"):
        refuse_if_missing(store.folder, 40)


def test_a_file_system_says_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_file_system(tmp_path) == FileSystem(*[True] * 6)
    assert list(tmp_path.iterdir()) == []
    for code, can in ((errno.EPERM, False), (errno.EIO, None)):
        with monkeypatch.context() as patch:

            def refuse(self: Path, target: object, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            patch.setattr(Path, "symlink_to", refuse)
            patch.setattr(Path, "rename", refuse)
            found = probe_file_system(tmp_path)
        assert (found.symlinks, found.replaces, found.moves_folders) == (can, can, can)
        assert found.exclusive
        assert bool(found.refusal(tmp_path)) == (can is False)
    assert list(FileSystem(symlinks=False).remarks()) == [
        "no symbolic links: `latest` will be a file"
    ]
