"""`kempner checkpoint push` against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import Fault, Hub, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import scaled
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kempner.checkpoint.store.retention import locate
from kempner.cli.checkpoint.download import _fetch
from kempner.cli.checkpoint.hub import HubExchange
from kempner.cli.checkpoint.push import _create, _upload
from kempner.run.process.exit_codes import RunError

TOKEN = "hf_" + "secret" * 5


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(token=TOKEN)) as hub:
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose only checkpoint is imported from a model that was downloaded."""
    folder = tmp_path_factory.mktemp("pushed")
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=1, hidden_size=16, intermediate_size=16,
        num_attention_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "model" / ".cache").mkdir()
    record = {"repository": "theirs/base", "commit": "c" * 40}
    (folder / "model" / ".cache" / "kempner-download.json").write_text(json.dumps(record))
    done = kempner({}, "checkpoint", "import", "--from-hf", folder / "model", "--into",
                   folder / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


def kempner(environ: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-m", "kempner", *map(str, words)],
        env=plain | {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_what_went_up_through_cuts_comes_down_and_the_token_is_nowhere(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    environ = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN}
    for kind in ("create", "tree", "yaml", "preupload", "batch", "upload", "verify", "commit"):
        hub.faults[kind] = [Fault(cut=0)]
    hub.faults["upload"] += [Fault(status=503), Fault(cut=500)]
    hub.faults["commit"] = [Fault(status=429), Fault(cut=0)]  # the last is made, its answer is lost
    words = ("checkpoint", "push", run, "ours/new", "--private")
    done = kempner(environ, *words, "--retries=20")
    assert done.returncode == 0, done.stderr
    there = hub.repositories["ours/new"]
    assert there.private
    assert [len(files) for files in there.commits.values()] == [0, len(hub.files("ours/new"))]
    card = hub.files("ours/new")["README.md"].decode()
    assert "base_model: theirs/base\n" in card
    assert str(tmp_path) not in card
    assert list((run / "exports").glob("push/*")) == []

    down = tmp_path / "down"
    fetched = kempner(environ, "download", "ours/new", "--output-dir", down)
    assert fetched.returncode == 0, fetched.stderr
    for name, content in hub.files("ours/new").items():
        assert (down / name).read_bytes() == content
    model, before = (AutoModelForCausalLM.from_pretrained(f) for f in (down, run.parent / "model"))
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in before.state_dict().items()
    }

    # A model that was there under other names leaves with the same commit; nothing is sent twice.
    there.commit(
        "main", {**hub.files("ours/new"), "model-00001-of-00002.safetensors": b"old" * 999}
    )
    uploads = hub.asked["upload"]
    again = kempner(environ, *words, "--step=0")
    assert again.returncode == 0, again.stderr
    assert "model-00001-of-00002.safetensors" not in hub.files("ours/new")
    assert hub.asked["upload"] == uploads

    told = [done, fetched, again]
    assert not any(TOKEN in one.stdout + one.stderr for one in told)
    files = [path for folder in (tmp_path, run) for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("fault", "words", "code", "sentence"),
    [
        ({"create": Fault(status=403)}, (), 2, "set HF_TOKEN to a token that may write it"),
        ({"create": Fault(status=401)}, (), 2, "set HF_TOKEN to a token that may write it"),
        ({"commit": Fault(status=413)}, (), 2, "HTTP 413, which another try does not help"),
        ({"upload": Fault(status=400)}, (), 2, "HTTP 400, which another try does not help"),
        ({}, ("--private",), 2, "is there already, and public"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_what_was_there(
    hub: Hub, run: Path, tmp_path: Path, fault: dict[str, Fault], words: tuple[str, ...],
    code: int, sentence: str,
) -> None:  # fmt: skip
    environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN}
    with pytest.MonkeyPatch.context() as patch, api_of(hub, patch) as api:
        if "create" not in fault:
            _create(api, "ours/new", "main", private=False)
        hub.always = fault
        done = kempner(environ, "checkpoint", "push", run, "ours/new", *words)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert all(hub.files(name) == {} for name in hub.repositories)


@contextmanager
def api_of(hub: Hub, patch: pytest.MonkeyPatch) -> Iterator[object]:
    from huggingface_hub import HfApi, constants

    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield HfApi(endpoint=hub.endpoint, token=TOKEN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["files", "objects", "path", "size", "oid", "lfs", "sha", "type", "uploadMode", "url",
             "actions", "upload", "href", "commitOid", "commitUrl", "private", "siblings", "error"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
BODIES = st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode())
KINDS = ("create", "info", "tree", "yaml", "preupload", "batch", "verify", "commit", "resolve")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(KINDS), body=BODIES, status=st.sampled_from([None, 400, 404, 409, 500]))
def test_whatever_the_hub_answers_ends_in_a_sentence_and_shows_no_half(
    tmp_path_factory: pytest.TempPathFactory, kind: str, body: bytes, status: int | None
) -> None:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "model").mkdir()
    whole = {"model.safetensors": b"weights" * 200, "README.md": b"---\ntags: [a]\n---\n"}
    for name, content in whole.items():
        (folder / "model" / name).write_bytes(content)
    exchange, said = HubExchange("ours/new", "main", "uploaded", "write"), list[str]()
    with (
        serving(Hub(token=TOKEN)) as hub,
        pytest.MonkeyPatch.context() as patch,
        api_of(hub, patch) as api,
    ):
        hub.always = {kind: Fault(status=status, body=body)}
        for action in (
            lambda: _create(api, "ours/new", "main", private=True),
            lambda: _upload(api, "ours/new", "main", folder / "model", "m"),
            lambda: _fetch(api, "ours/new", "main", folder / "down", []),
        ):
            try:
                exchange.persist(action, retries=0)
            except RunError as error:
                said.append(str(error))
        assert not any("\n" in sentence or TOKEN in sentence for sentence in said)
        for there in hub.repositories.values():
            assert all(files in ({}, whole) for files in there.commits.values())


def test_without_the_package_it_names_the_extra(run: Path, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = kempner({"PYTHONPATH": path}, "checkpoint", "push", locate(run)[0], "ours/new")
    assert (done.returncode, "pip install 'kempner[hf]'" in done.stderr) == (2, True), done.stderr
