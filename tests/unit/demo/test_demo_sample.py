"""Text from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "demo"))
import sample

CONFIG = Config(
    model=ModelSection(dim=16, n_layers=1, n_heads=2, ffn_dim=32), train=TrainSection(seed=3)
)


def model(config: Config = CONFIG) -> Transformer:
    return build_model(config, 257, torch.device("cpu"), None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_come_from_the_checkpoint(tmp_path: Path) -> None:
    trained = model(CONFIG.model_copy(update={"train": TrainSection(seed=4)}))
    state = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
    state["optimizer.embed.weight.exp_avg"] = torch.zeros(257, 16)
    state_dict_saver.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    loaded = sample.load_model(CONFIG, tmp_path / "step", 257)
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])


def test_text_goes_on_from_the_prompt_and_repeats_with_its_seed() -> None:
    first, second, other = (
        sample.sample_text(model(), "Übrigens, ", new_tokens=30, context=16, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first.startswith("Übrigens, ")
    assert len(first) > len("Übrigens, ")


def test_the_end_of_a_document_is_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.tensor([256, *b"The end.", 256, *b"Next \xff"])
    monkeypatch.setattr(sample, "generate", lambda *_, **__: tokens)
    assert sample.sample_text(model(), "The", context=16) == "The end.\n\nNext �"
