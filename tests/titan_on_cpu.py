"""torchtitan's own trainer on a CPU, with its own checkpoints: sample i is word i.

torchtitan is told that its device is the CPU. Its kernels for experts want triton, which a CPU has
no use for, and this model no experts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from kempner.cluster.network.ports import free_port

PADS = ["<|begin|>", "<|end|>"]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

Note = Callable[[int, torch.Tensor, list[int], list[float]], object]
"""Takes a micro batch: its step, loss, samples and learning rates; before the weights change."""


@dataclass(frozen=True)
class Task:
    """How much is trained: `batch` sequences of `length` in a micro batch of a rank."""

    samples: int
    length: int
    batch: int
    steps: int
    accumulation: int
    save_every: int

    def data(self, _: str) -> Dataset:
        """A sample is its word again and again, and as long as a sequence with its two ends."""
        texts = [" ".join([f"w{i}"] * (self.length - 1)) for i in range(self.samples)]
        return Dataset.from_dict({"text": texts})

    def arguments(self, tokenizer: Path) -> list[str]:
        """For torchtitan's command line."""
        settings = {
            "model.name": "llama3",
            "model.flavor": "debugmodel",
            "model.hf_assets_path": str(tokenizer),
            "training.dataset": "words",
            "training.seq_len": self.length,
            "training.local_batch_size": self.batch,
            "training.global_batch_size": self.batch * self.accumulation * WORLD,
            "training.steps": self.steps,
            "training.mixed_precision_param": "float32",
            "parallelism.data_parallel_replicate_degree": WORLD,
            "parallelism.data_parallel_shard_degree": 1,
            "activation_checkpoint.mode": "none",
            "checkpoint.interval": self.save_every,
            "metrics.log_freq": 1,
            "debug.seed": 1,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return [*words, "--checkpoint.enable", "--debug.deterministic"]


def train(task: Task, note: Note, end: Callable[[int, Any], object]) -> None:
    """Train to the end, which is told the number of steps and the model."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ |= {**place, "MASTER_PORT": str(free_port("127.0.0.1", str(os.getpid())))}
    tokenizer = Path(f"tokenizer-{os.environ['RANK']}")
    _write_tokenizer(tokenizer, task.samples)
    sys.argv[1:] = task.arguments(tokenizer)  # torchtitan reads it as it is imported
    _prepare_for_cpu()
    from torchtitan import train
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    train.time.sleep = lambda _: None  # for seconds, at the end

    class Noting(train.Trainer):
        def forward_backward_step(self, *, input_dict: Any, **more: Any) -> Any:
            samples = (input_dict["input"][:, 1] - len(PADS)).tolist()
            loss = super().forward_backward_step(input_dict=input_dict, **more)
            rates = [group["lr"] for one in self.optimizers for group in one.param_groups]
            note(self.step, loss, samples, rates)
            return loss

        def train(self) -> None:
            super().train()
            end(self.step, self.model_parts[0])

    DATASETS["words"] = DatasetConfig("words", task.data, lambda sample: sample["text"])
    train.main(Noting)


def _prepare_for_cpu() -> None:
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


def _write_tokenizer(folder: Path, samples: int) -> None:
    """The words of the samples, as Hugging Face has tokenizers."""
    folder.mkdir(exist_ok=True)
    words = [*PADS, *(f"w{i}" for i in range(samples))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, PADS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(PADS)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": PADS[0], "eos_token": PADS[1], "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**ends, "add_eos_token": True}))
