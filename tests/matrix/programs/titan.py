"""Trains by torchtitan's own trainer and its checkpoints: titan.py torchtitan VARIANT

torchtitan is told that its device is the CPU. Its kernels for experts want triton, which a CPU has
no use for, and this model no experts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import record
import torch
import torch.distributed as dist
from datasets import Dataset
from record import RANK, WORLD
from tokenizers import Tokenizer, models, pre_tokenizers

from kempner.cluster.network.ports import free_port

LENGTH, BATCH, STEPS, EPOCH = 6, 2, 14, 5
ACCUMULATION = 2 if sys.argv[2] == "accumulate" else 1
SAMPLES = EPOCH * BATCH * ACCUMULATION * WORLD
PADS = ["<|begin|>", "<|end|>"]


def prepare_for_cpu() -> None:
    """What torchtitan asks a GPU, a CPU answers. Before torchtitan is imported."""
    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.tools import utils

    cpu: Any = ModuleType("cpu")
    cpu.set_device = cpu.synchronize = cpu.reset_peak_memory_stats = lambda *_: None
    cpu.empty_cache, cpu.current_device = lambda: None, lambda: None
    cpu.get_device_name = lambda _: "cpu"
    cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
    numbers = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    cpu.memory_stats = lambda _: dict.fromkeys(numbers, 0)
    utils.device_type, utils.device_module = "cpu", cpu
    barrier = dist.barrier
    dist.barrier = lambda *more, device_ids=None, **options: barrier(*more, **options)


def samples(_: str) -> Dataset:
    """Sample i is word i again and again, and as long as a sequence with its two ends."""
    return Dataset.from_dict({"text": [" ".join([f"w{i}"] * (LENGTH - 1)) for i in range(SAMPLES)]})


def write_tokenizer(folder: Path) -> None:
    """The words of the samples, as Hugging Face has tokenizers."""
    folder.mkdir(exist_ok=True)
    words = [*PADS, *(f"w{i}" for i in range(SAMPLES))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, PADS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(PADS)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": PADS[0], "eos_token": PADS[1], "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**ends, "add_eos_token": True}))


def arguments(tokenizer: Path) -> list[str]:
    """For torchtitan's command line."""
    settings = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": str(tokenizer),
        "training.dataset": "words",
        "training.seq_len": LENGTH,
        "training.local_batch_size": BATCH,
        "training.global_batch_size": BATCH * ACCUMULATION * WORLD,
        "training.steps": STEPS,
        "training.mixed_precision_param": "float32",
        "parallelism.data_parallel_replicate_degree": WORLD,
        "parallelism.data_parallel_shard_degree": 1,
        "activation_checkpoint.mode": "none",
        "checkpoint.interval": 4,
        "metrics.log_freq": 1,
        "debug.seed": 1,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*words, "--checkpoint.enable", "--debug.deterministic"]


def main() -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ |= {**place, "MASTER_PORT": str(free_port("127.0.0.1", str(os.getpid())))}
    tokenizer = Path(f"tokenizer-{RANK}")
    write_tokenizer(tokenizer)
    sys.argv[1:] = arguments(tokenizer)  # torchtitan reads it as it is imported
    prepare_for_cpu()
    from torchtitan import train
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    train.time.sleep = lambda _: None  # for seconds, at the end

    class Noting(train.Trainer):
        """Notes what it trains on, before trouble comes."""

        def forward_backward_step(self, *, input_dict: Any, **more: Any) -> Any:
            ids = (input_dict["input"][:, 1] - len(PADS)).tolist()
            loss = super().forward_backward_step(input_dict=input_dict, **more)
            rates = [group["lr"] for one in self.optimizers for group in one.param_groups]
            record.step(self.step, loss, ids, rates)
            return loss

        def train(self) -> None:
            super().train()
            record.end(self.step, self.model_parts[0])

    DATASETS["words"] = DatasetConfig("words", samples, lambda sample: sample["text"])
    train.main(Noting)


if __name__ == "__main__":
    main()
