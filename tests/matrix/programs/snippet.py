"""A snippet of a page, as it is typed, in a program that has the names that it takes for granted.

snippet.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
from loops import Points
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from kempner import survive

WRAPS_THE_MODEL = ("surviving(", "accelerator", "lightning")
"""Words of snippets whose library sees to several ranks by itself."""

made = 0


def count(*_: object) -> None:
    global made
    made += 1
    record.strike(f"made {made}")


class Names:
    """What snippets take for granted, each as simple as can be: `all`, by name."""

    def __init__(self, code: str) -> None:
        torch.manual_seed(3)
        model, critic = nn.Linear(4, 1), nn.Linear(4, 1)
        if record.WORLD > 1 and not any(shell in code for shell in WRAPS_THE_MODEL):
            dist.init_process_group("gloo")
            model, critic = DistributedDataParallel(model), DistributedDataParallel(critic)
        optimizer = torch.optim.AdamW(model.parameters())
        points = Points(48)
        self.all: dict[str, Any] = {
            **{"model": model, "optimizer": optimizer, "critic": critic, "nn": nn, "torch": torch},
            **{"dataset": points, "points": points, "DataLoader": DataLoader, "survive": survive},
            "loader": DataLoader(points, batch_size=4, shuffle=True),
            "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1),
            "schedule": StepLR(optimizer, 50),
            "best": {"loss": 9.0},
            "generator": torch.Generator().manual_seed(record.RANK),
            "STEPS": 100,
            "train": self.train,
        }
        self.registered = "state=" in code
        if "surviving(" in code:
            self.all |= of_transformers()
        elif "Fabric" in code:
            from lightning.fabric import Fabric

            self.all["Fabric"] = Fabric
        elif "lightning" in code:
            self.all |= of_lightning()
        if "accelerator" in code:
            from accelerate import Accelerator

            self.all["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=4)

    def train(self, batch: Any = None) -> None:
        """What stands for the user's own lines in the loop."""
        names = self.all
        x = torch.rand(4, 4) if batch is None else batch[1]
        loss = names["model"](x).square().mean()
        if self.registered:
            noise = torch.rand(1, generator=names["generator"])
            loss = loss + names["critic"](x + noise).square().mean()
            names["best"]["loss"] = min(names["best"]["loss"], loss.item())
        shell = names.get("accelerator") or names.get("fabric")
        shell.backward(loss) if shell else loss.backward()
        for name in ("optimizer", "critic_optimizer")[: 1 + self.registered]:
            names[name].step()
            names[name].zero_grad()
        if self.registered:
            names["schedule"].step()


def of_transformers() -> dict[str, Any]:
    from hugging_face import network, samples_of_ids
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "outputs", max_steps=150, save_steps=50, report_to=[], use_cpu=True, disable_tqdm=True
    )
    samples = samples_of_ids()
    return {
        "Trainer": Trainer,
        "arguments": arguments,
        "samples": samples,
        "model": network("steps"),
    }


def of_lightning() -> dict[str, Any]:
    from lightning.pytorch import Trainer
    from with_lightning import Curve

    class Quiet(Curve):
        """Notes nothing."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layers(batch[1]).square().mean()

    module = Quiet("steps")
    return {"Trainer": Trainer, "module": module, "model": module, "points": Points(1200)}


def completed(code: str) -> str:
    """With the user's own lines where the snippet leaves them out."""
    lines: list[str] = []
    for line in code.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}train(locals().get('batch'))" if line.strip() == "..." else line)
    last = lines[-1]
    indent = last[: len(last) - len(last.lstrip())] + ("    " if last.endswith(":") else "")
    if indent and not any("train(" in line for line in lines):
        lines.append(f"{indent}train(locals().get('batch'))")
    return "\n".join(lines)


if __name__ == "__main__":
    register_optimizer_step_post_hook(count)
    code = Path(sys.argv[1]).read_text()
    names = Names(code).all
    try:
        exec(compile(completed(code), sys.argv[1], "exec"), names)
    finally:
        record.fact("made", "0", made)
    record.end(0, names["model"])
