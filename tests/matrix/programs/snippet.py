"""A snippet of a page, as it is typed, in a program that has the names that it takes for granted.

snippet.py FILE
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import record
import torch
from loops import Points
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

made = 0


def count(*_: object) -> None:
    global made
    made += 1
    record.strike(f"made {made}")


class Names:
    """What snippets take for granted, each as simple as can be."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.dataset = self.points = Points(40)
        self.loader = DataLoader(self.dataset, batch_size=4, shuffle=True)
        self.model = nn.Linear(4, 1)
        self.critic = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.schedule = StepLR(self.optimizer, 50)
        self.best: dict[str, Any] = {"loss": 9.0}
        self.generator = torch.Generator().manual_seed(record.RANK)
        self.registered = False

    def all(self, code: str) -> dict[str, Any]:
        """By name, for this snippet."""
        self.registered = "state=" in code
        names = {**vars(self), "STEPS": 100, "islice": islice, "accumulation": 2}
        names |= {"train": self.train, "torch": torch, "DataLoader": DataLoader, "nn": nn}
        if "surviving(" in code:
            names |= self._of_transformers()
        if "fabric." in code:
            from lightning.fabric import Fabric

            names["Fabric"] = Fabric
        elif "lightning" in code:
            names |= self._of_lightning()
        if "accelerator" in code:
            from accelerate import Accelerator

            names["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=2)
        return names

    def train(self, batch: Any = None) -> None:
        """What stands for the user's own lines in the loop."""
        x = torch.rand(4, 4) if batch is None else batch[1]
        loss = self.model(x).square().mean()
        if self.registered:
            loss = loss + self.critic(x + torch.rand(1, generator=self.generator)).square().mean()
            self.best["loss"] = min(self.best["loss"], loss.item())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.registered:
            self.critic_optimizer.step()
            self.critic_optimizer.zero_grad()
            self.schedule.step()

    def _of_transformers(self) -> dict[str, Any]:
        from hugging_face import network, samples_of_ids
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            "outputs", max_steps=150, save_steps=50, report_to=[], use_cpu=True, disable_tqdm=True
        )
        self.model = network("steps")
        return {
            "Trainer": Trainer,
            "arguments": arguments,
            "samples": samples_of_ids(),
            "model": self.model,
        }

    def _of_lightning(self) -> dict[str, Any]:
        from lightning.pytorch import Trainer
        from with_lightning import Curve

        class Quiet(Curve):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return self.layers(batch[1]).square().mean()

        self.model = Quiet("steps")
        return {"Trainer": Trainer, "module": self.model, "points": Points(400)}


def completed(code: str) -> str:
    """With the user's own lines where the snippet leaves them out."""
    lines: list[str] = []
    for line in code.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}train(locals().get('batch'))" if line.strip() == "..." else line)
    last = lines[-1]
    if last.endswith(":"):
        indent = last[: len(last) - len(last.lstrip())]
        lines.append(f"{indent}    train(locals().get('batch'))")
    return "\n".join(lines)


if __name__ == "__main__":
    register_optimizer_step_post_hook(count)
    names = Names()
    code = Path(sys.argv[1]).read_text()
    namespace = names.all(code)
    try:
        exec(compile(completed(code), sys.argv[1], "exec"), namespace)
    finally:
        record.fact("made", "0", made)
    record.end(0, names.model)
