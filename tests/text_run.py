"""A run with a model of kempner's own over real text, committed without training it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from saved import commit_state
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kempner.config.loading import dumps
from kempner.config.sections import Config, DataSection, TrainSection
from kempner.data.prepare.pipeline import prepare
from kempner.model.initial_weights import initialise
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.process.durable_io import write_durable
from kempner.run.record.run_dir import RunDirectory

TEXT = "Übrigens: the cat sat on the mat, and the dog  sat on the cat.\n" * 8
SEQ_LEN = 48


def make_text_run(folder: Path, tokenizer: str = "byte", vocab_size: int | None = None) -> Path:
    """The directory of a run with a commit of step 40; its data are in `folder`, too.

    `tokenizer` is as `prepare` has it. The model is as sure of itself as a trained one, and has
    `vocab_size` tokens, or those of its data.
    """
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    prepared = prepare(folder / "data", [folder / "a.txt"], tokenizer=tokenizer)
    shape = Shape(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=48,
        vocab_size=vocab_size or prepared.index.vocab_size,
        max_seq_len=256,
        rope_theta=5e4,
        norm_eps=1e-5,
        tie_embeddings=False,
        dropout=0.0,
    )
    model = Transformer(shape)
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)
    run = RunDirectory(folder / "run")
    known = {name: size for name, size in asdict(shape).items() if name not in _FREE}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    commit_state(run, state, 40, world=2, model=known)
    config = Config(
        data=DataSection(dataset_path=str(folder / "data")), train=TrainSection(seq_len=SEQ_LEN)
    )
    write_durable(run.config, dumps(config).encode())
    return run.path


_FREE = ("dropout", "max_seq_len")


def make_tokenizer(path: Path) -> str:
    """A byte-level tokenizer.json that puts a token before each text, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|begin|>", "<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(path))
    return str(path)
