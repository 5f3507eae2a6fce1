"""The plain loop under dlrover-run, with its flash checkpoints: each step in memory."""

from __future__ import annotations

import plain_loop
import task
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from shape import SAVE_EVERY


class Flash(plain_loop.Keeper):
    """In memory after each step, on disk every few and before a stop."""

    def restore(self, run: plain_loop.Run) -> None:
        self.checkpointer = DdpCheckpointer(str(task.FOLDER / "flash"))
        if state := self.checkpointer.load_checkpoint():
            run.take(state)

    def after_step(self, run: plain_loop.Run, stopping: bool) -> None:
        disk = stopping or run.done % SAVE_EVERY == 0
        kind = StorageType.DISK if disk else StorageType.MEMORY
        self.checkpointer.save_checkpoint(run.done, run.state(), storage_type=kind)
        if stopping:
            self.checkpointer.wait_latest_checkpoint(30)


if __name__ == "__main__":
    plain_loop.main(Flash())
