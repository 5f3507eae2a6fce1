"""A block is compiled whole, once for all blocks, and keeps its names; kernels are for drills."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from text_run import make_text_run
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kempner.config.model import AdapterSection
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model, compile_blocks, keep_compiled
from kempner.model.transformer import Transformer

TOKENS = torch.arange(32).view(2, 16)
TOLERANCE = 3e-6
"""Largest difference of a gradient, relative to its largest element: a few float32 roundings."""


def build(
    checkpointing: str, document_end: int | None = None, adapter: int | None = None
) -> Transformer:
    sizes = ModelSection(dim=16, n_layers=9, n_heads=2, n_kv_heads=1, ffn_dim=24, qk_norm=True)
    train = {"seq_len": 16, "activation_checkpointing": checkpointing}
    beside = AdapterSection(rank=adapter)
    config = Config(model=sizes, train=TrainSection.model_validate(train), adapter=beside)
    model = build_model(config, 61, torch.device("cpu"), None)
    draws = torch.Generator().manual_seed(1)
    for parameter in model.parameters() if adapter else ():  # what is not imported has no values
        torch.nn.init.normal_(parameter, std=0.1, generator=draws)
    model.document_end = document_end
    return model


def step(model: Transformer) -> dict[str, Tensor]:
    torch.autograd.backward(model(TOKENS, TOKENS))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("checkpointing", "document_end", "adapter"),
    [
        *(("none", None, None), ("selective", None, None), ("full", None, None)),
        *(("selective", 5, None), ("full", 5, 2)),
    ],
)
def test_one_graph_is_compiled_for_all_blocks(
    checkpointing: str,
    document_end: int | None,
    adapter: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    model = build(checkpointing, document_end, adapter)
    expected = step(build(checkpointing, document_end, adapter))
    compile_blocks(model)
    assert list(model.state_dict()) == list(build("none", adapter=adapter).state_dict())
    with torch.no_grad():
        model(TOKENS, TOKENS)
    assert backend.frame_count == 0
    found = step(model)
    # Beside frozen weights the input of the first block needs no gradient: it has its own graph.
    assert backend.frame_count == (1 if adapter is None else 2)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max().item() <= TOLERANCE * largest, name


def test_what_is_compiled_stays_with_the_run_for_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is as before afterwards
    folders = set()
    for processor in ("this", "another"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        keep_compiled(tmp_path / "compiled")
        folders.add(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        if processor == "this":
            keep_compiled(tmp_path / "elsewhere")  # it is named already
            assert {Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])} == folders
            monkeypatch.setattr(Path, "read_text", lambda path: "flags : one_more\n")
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "compiled"}


START = """
import kempner.training.main as main
from kempner.cli import entry

def build(*given):
    import torch._dynamo  # as FSDP2 does
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    print(cache_dir())
    raise SystemExit(0)

main.build = build
entry.main(["train", "run.toml", "--train.compile=true"])
"""


def test_a_rank_that_starts_by_itself_keeps_what_it_compiles_with_its_run(tmp_path: Path) -> None:
    """The compiler chooses a folder in /tmp as soon as it is imported: that must be too late."""
    make_text_run(tmp_path)
    (tmp_path / "run.toml").write_text(
        f'run.dir = "{tmp_path}"\nrun.name = "new"\ndata.dataset_path = "{tmp_path}/data"\n'
        "model.preset = 'debug'\ntrain.seq_len = 16\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", START]
    started = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    folder = Path(started.stdout.splitlines()[-1])
    assert folder.parent == tmp_path / "new" / "compiled", started.stderr
