"""The plain loop with lm-resiliency: its GEMINI keeps each step in memory; torchrun restarts."""

from __future__ import annotations

from typing import Any

import plain_loop
import task
import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from shape import SAVE_EVERY


class Gemini(plain_loop.Keeper):
    """Its hooks save after each step, and flush to the node's disk every few."""

    def restore(self, run: plain_loop.Run) -> None:
        restored: dict[str, Any] = {}
        self.handle = enable_resiliency(
            run.model,
            run.optimizer,
            interval=1,
            enable_detection=False,
            checkpoint=InMemoryCkptConfig(
                interval=1,
                disk_flush_interval=SAVE_EVERY,
                disk_folder=str(task.FOLDER / "gemini"),
                run_id="peers",
                replication_jump=1,
                pin_memory=False,
                verify_integrity=True,
            ),
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            extra_state_fn=run.own,
            load_extra_state_fn=restored.update,
        )
        run.done = self.handle.step_count
        if restored:
            run.take_own(restored)

    def after_step(self, run: plain_loop.Run, stopping: bool) -> None:
        if stopping:
            self.handle.flush_for_restart()


if __name__ == "__main__":
    plain_loop.main(Gemini())
