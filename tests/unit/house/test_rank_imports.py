"""A rank that is alone takes its first step without what only sharding and compiling need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import scaled

UNUSED = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"]
UNUSED += ["torch.distributed.checkpoint", "sympy", "networkx", "kempner.supervisor", "tokenizers"]

FIRST_STEP = """
import sys
import torch
from kempner.cli.app import load_command
load_command("train")
import kempner.training.main
from kempner.checkpoint.tensors.file_buffer import tensor_specs
from kempner.checkpoint.tensors.state import Binding
from kempner.config.sections import Config, ModelSection, OptimizerSection
from kempner.model.sharding import build_model
from kempner.training.compute.optimizer import build_optimizer, update
torch.set_deterministic_debug_mode("error")
config = Config(model=ModelSection(dim=32, n_layers=1, n_heads=2, ffn_dim=64))
model = build_model(config, 64, torch.device("cpu"), None)
optimizer = build_optimizer(model, OptimizerSection(name=sys.argv[1]))
loss = model(torch.zeros(2, 8, dtype=torch.int64)).sum()
loss.backward()
update(model, optimizer, loss.detach(), 1e-3, 1.0)
tensor_specs(Binding(model, optimizer).table, 1)
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_rank_that_is_alone_imports_only_what_it_needs(optimizer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, optimizer],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "torch" in imported
    assert not imported.intersection(UNUSED)
