"""`kempner download` against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Fault, Hub, Repository, serving
from patience import scaled

FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 4096,
    "model-00002-of-00002.safetensors": b"second" * 5000,
    "original/consolidated.00.pth": b"the same once more" * 1000,
}
LARGE = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub() -> Iterator[Hub]:
    there = Repository()
    there.commit("main", FILES)
    with serving(Hub({"ours/tiny": there})) as hub:
        yield hub


def start(hub: Hub, folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    home = {"HF_HOME": str(folder.parent / "home"), "HF_ENDPOINT": hub.endpoint}
    arguments = (*arguments, "--retries=0") if "--retries" not in str(arguments) else arguments
    return subprocess.Popen(
        [sys.executable, "-m", "kempner", "download", *arguments, "--output-dir", str(folder)],
        env={**plain, **home, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def download(hub: Hub, folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """The exit code, and what was said last."""
    process = start(hub, folder, *arguments, **environ)
    out, err = process.communicate(timeout=scaled(120))
    assert "Traceback" not in err, err
    return process.returncode, (out if process.returncode == 0 else err).strip().splitlines()[-1]


def test_it_brings_what_is_wanted_and_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    folder, leave_out = tmp_path / "tiny", ("--ignore-patterns", "original/*")
    hub.always["resolve"] = Fault(cut=300_000)
    status, sentence = download(hub, folder, "ours/tiny", *leave_out, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert status == 69, sentence
    assert sentence.startswith("kempner: ours/tiny cannot be downloaded")
    assert sentence.endswith("the same command goes on from here")
    assert not (folder / LARGE).exists()

    hub.always.clear()
    hub.sent.clear()
    status, sentence = download(hub, folder, "ours/tiny", *leave_out)
    wanted = {name: content for name, content in FILES.items() if not name.startswith("original")}
    size = sum(map(len, wanted.values()))
    assert (status, sentence) == (0, f"{folder}: 3 files, {size:,} bytes")
    for name, content in wanted.items():
        assert (folder / name).read_bytes() == content
    assert not (folder / "original").exists()
    assert hub.sent == {LARGE: len(FILES[LARGE])}
    record = json.loads((folder / ".cache/kempner-download.json").read_text())
    assert record["commit"] == hub.repositories["ours/tiny"].branches["main"]

    hub.sent.clear()
    assert download(hub, folder, "ours/tiny", *leave_out)[0] == 0
    assert hub.sent == {}


def test_what_fails_for_a_moment_and_what_comes_damaged_is_fetched_again(
    hub: Hub, tmp_path: Path
) -> None:
    """Of another content in the same size, too; the second try's answers are sound."""
    other = FILES[LARGE][::-1]
    hub.faults = {"info": [Fault(cut=3)], "tree": [Fault(body=b"[{}]")]}
    hub.faults["resolve"] = [Fault(body=other)] * 2  # its head, and its bytes
    hub.repositories["ours/tiny"].commit("main", {"only.bin": FILES[LARGE]})
    status, sentence = download(hub, tmp_path / "tiny", "ours/tiny", "--retries=9")
    assert status == 0, sentence
    assert (tmp_path / "tiny" / "only.bin").read_bytes() == FILES[LARGE]


def test_of_many_processes_one_downloads(hub: Hub, tmp_path: Path) -> None:
    ranks = [start(hub, tmp_path / "tiny", "ours/tiny") for _ in range(3)]
    for rank in ranks:
        _, said = rank.communicate(timeout=scaled(120))
        assert rank.returncode == 0, said
    assert hub.sent == {name: len(content) for name, content in FILES.items()}


def test_the_token_comes_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_ours"
    status, sentence = download(hub, tmp_path / "tiny", "ours/tiny")
    assert (status, "there is no model ours/tiny, or none that you may see" in sentence) == (
        2,
        True,
    )
    assert download(hub, tmp_path / "tiny", "ours/tiny", HF_TOKEN="hf_ours")[0] == 0


@pytest.mark.parametrize(
    ("repository", "hub_is", "code", "sentence"),
    [
        ("ours/other", {}, 2, "there is no model ours/other"),
        ("a/b/c", {}, 2, "a/b/c is not the name of a model"),
        ("ours/tiny", {"gated": True, "token": "x"}, 2, "only for those who have asked"),
        ("ours/tiny", {"always": {"info": Fault(status=403)}}, 2, "refuses ours/tiny (HTTP 403)"),
        ("ours/tiny", {"always": {"tree": Fault(body=b"[{}]")}}, 69, "makes no sense"),
        ("ours/tiny", {"always": {"tree": Fault(body=b"[]")}}, 2, "ours/tiny has no file"),
        ("ours/tiny", {"endpoint": "http://127.0.0.1:9"}, 69, "Hugging Face does not answer"),
    ],
)
def test_a_failure_is_said_in_a_sentence(
    hub: Hub,
    tmp_path: Path,
    repository: str,
    hub_is: dict[str, object],
    code: int,
    sentence: str,
) -> None:
    for name, value in hub_is.items():
        setattr(hub, name, value)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")  # what is there already proves nothing
    status, told = download(hub, tmp_path / "tiny", repository)
    assert (status, sentence in told) == (code, True), told


def test_an_unknown_revision_is_said(hub: Hub, tmp_path: Path) -> None:
    status, told = download(hub, tmp_path / "tiny", "ours/tiny", "--revision", "v9")
    assert (status, "ours/tiny has no revision v9" in told) == (2, True), told


def test_a_full_disk_is_said(hub: Hub, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3_500_000))
    status, told = download(hub, small_disk / "tiny", "ours/tiny", HF_HOME=str(small_disk.parent))
    assert (status, "No space left on device" in told) == (74, True), told


def test_without_the_package_it_names_the_extra(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    status, told = download(hub, tmp_path / "tiny", "ours/tiny", PYTHONPATH=path)
    assert (status, "pip install 'kempner[hf]'" in told) == (2, True), told
