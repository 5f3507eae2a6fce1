"""`kempner download` against a server on this machine that speaks as much as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from patience import scaled

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 4096,
    "model-00002-of-00002.safetensors": b"second" * 5000,
    "original/consolidated.00.pth": b"the same once more" * 1000,
}


@dataclass
class Hub:
    """What the server has, does and was asked for."""

    cut_off: int | None = None
    """After so many bytes a transfer breaks."""
    token: str | None = None
    """What one must have to see anything."""
    gated: bool = False
    status: int | None = None
    """What every question is answered with."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by file."""
    endpoint: str = ""


class Handler(BaseHTTPRequestHandler):
    """The four questions that are needed: a model, its tree, the head and the bytes of a file."""

    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.status is not None:
            self.answer(self.hub.status, b"{}")
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            kind = "GatedRepo" if self.hub.gated else "RepoNotFound"
            self.answer(403 if self.hub.gated else 404, b"{}", {"X-Error-Code": kind})
        elif path.startswith(f"/ours/tiny/resolve/{COMMIT}/"):
            self.send_file(path.split("/", 5)[5], body)
        elif path.startswith(f"/api/models/ours/tiny/tree/{COMMIT}"):
            self.answer(200, json.dumps([entry(path) for path in FILES]).encode())
        elif path in ("/api/models/ours/tiny", "/api/models/ours/tiny/revision/main"):
            names = [{"rfilename": path} for path in FILES]
            model = {"id": "ours/tiny", "sha": COMMIT, "siblings": names, "private": False}
            self.answer(200, json.dumps(model).encode())
        elif path.startswith("/api/models/ours/tiny/revision/"):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send_file(self, name: str, body: bool) -> None:
        whole = FILES[name]
        headers = {"ETag": f'"{hashlib.sha1(whole).hexdigest()}"', "X-Repo-Commit": COMMIT}
        most = self.hub.cut_off if self.hub.cut_off is not None else len(whole)
        self.answer(200, whole if body else b"", headers, len(whole), most)
        if body:
            self.hub.sent[name] += min(len(whole), most)

    def answer(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
        most: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(content[:most])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what was asked is in `hub`."""


def entry(path: str) -> dict[str, object]:
    content = FILES[path]
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("OfThisHub", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def start(hub: Hub, folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    home = {"HF_HOME": str(folder.parent / "home"), "HF_ENDPOINT": hub.endpoint}
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
    large = "model-00001-of-00002.safetensors"
    hub.cut_off = 300_000
    status, sentence = download(hub, folder, "ours/tiny", *leave_out, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert status == 69, sentence
    assert sentence.startswith("kempner: ours/tiny cannot be downloaded")
    assert sentence.endswith("the same command goes on from here")
    assert not (folder / large).exists()

    hub.cut_off = None
    hub.sent.clear()
    status, sentence = download(hub, folder, "ours/tiny", *leave_out)
    wanted = {name: content for name, content in FILES.items() if not name.startswith("original")}
    size = sum(map(len, wanted.values()))
    assert (status, sentence) == (0, f"{folder}: 3 files, {size:,} bytes")
    for name, content in wanted.items():
        assert (folder / name).read_bytes() == content
    assert not (folder / "original").exists()
    assert hub.sent == {large: len(FILES[large])}

    hub.sent.clear()
    assert download(hub, folder, "ours/tiny", *leave_out)[0] == 0
    assert hub.sent == {}


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
        ("ours/tiny", {"status": 403}, 2, "refuses ours/tiny (HTTP 403)"),
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
