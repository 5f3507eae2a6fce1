"""Print text that a trained demo model makes up.

    python scripts/demo/sample.py CONFIG [--prompt TEXT]

Reads the run's latest checkpoint with the stock `torch.distributed.checkpoint.load`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader

from kempner.checkpoint.format.names import LATEST
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.data.files.index import read_index
from kempner.model.generate import generate
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer
from kempner.run.record.run_dir import RunDirectory

BYTES = 256
"""Token ids below are bytes; the next one ends a document."""


def load_model(config: Config, checkpoint: Path, vocab_size: int) -> Transformer:
    """The model of a checkpoint directory, on CPU and ready to generate."""
    model = build_model(config, vocab_size, torch.device("cpu"), None)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(state, checkpoint_id=checkpoint, no_dist=True)
    return model.eval()


def sample_text(
    model: Transformer,
    prompt: str,
    *,
    new_tokens: int = 400,
    context: int,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """The prompt and what a byte model adds to it; a document that ends gives way to the next.

    Args:
        model: of byte tokens.
        prompt: may be empty: then a document begins.
        new_tokens: bytes to add.
        context: tokens to look back.
        temperature: 0 always takes the likeliest byte; 1 samples from the model as it is.
        top_k: how many of the likeliest bytes to sample from.
        seed: of the sampling.
    """
    start = torch.tensor([BYTES, *prompt.encode()])
    generator = torch.Generator().manual_seed(seed)
    tokens = generate(
        model,
        start,
        new_tokens=new_tokens,
        context=context,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
    )
    documents = bytes(ord("\0") if t >= BYTES else t for t in tokens[1:].tolist())
    return documents.decode("utf-8", "replace").replace("\0", "\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="configuration of the run")
    parser.add_argument("--prompt", default="The ", help="how the text begins")
    given = parser.parse_args()
    config = load(given.config)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    folder = Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
    if not (folder / LATEST).is_dir():
        sys.exit(f"{folder} holds no checkpoint yet: train with {given.config} first")
    vocab_size = config.model.vocab_size or read_index(Path(config.data.dataset_path)).vocab_size
    model = load_model(config, folder / LATEST, vocab_size)
    print(sample_text(model, given.prompt, context=config.train.seq_len))


if __name__ == "__main__":
    main()
