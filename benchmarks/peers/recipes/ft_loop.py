"""torchft's DDP, after its train_ddp.py: each rank is a replica group that can be lost.

Under a lighthouse and one torchrun per group. A group that comes back heals from the other. The
checkpoint on disk, every few steps, is what its manager's page asks for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from shape import EVALUATE_EVERY, GLOBAL_BATCH, PER_EPOCH, SAVE_EVERY, STEPS
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer
from torchft import ProcessGroupGloo as Gloo

GROUP = int(os.environ.get("REPLICA_GROUP_ID", "0"))
GROUPS = int(os.environ.get("NUM_REPLICA_GROUPS", "1"))
SAVED = task.FOLDER / f"saved-{GROUP}.pt"


def main() -> None:
    torch.manual_seed(1)
    model = task.curve()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def take(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    dist.init_process_group("gloo")
    manager = Manager(
        pg=Gloo(),
        load_state_dict=take,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"group_{GROUP}_",
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    sampler = DistributedSampler(task.Points(), GROUP, GROUPS, seed=1)
    loader = StatefulDataLoader(task.Points(), GLOBAL_BATCH // GROUPS, sampler=sampler)
    drawn: torch.Tensor | None = None
    if SAVED.exists():
        saved = torch.load(SAVED, weights_only=False)
        take(saved["state"])
        manager.load_state_dict(saved["manager"])
        loader.load_state_dict(saved["loader"])
        drawn = saved["random"]
    while manager.current_step() < STEPS:
        sampler.set_epoch(manager.current_step() // PER_EPOCH)
        batches = iter(loader)
        if drawn is not None:  # an iterator that is made draws a random number
            torch.set_rng_state(drawn)
            drawn = None
        for indices, x in batches:
            optimizer.zero_grad()
            loss = task.loss_of(replicated, x)
            task.note(manager.current_step() + 1, indices.tolist(), loss.item(), GROUP)
            loss.backward()
            optimizer.step()
            step = manager.current_step()
            if step % SAVE_EVERY == 0:
                parts = {"manager": manager.state_dict(), "loader": loader.state_dict()}
                parts |= {"state": state(), "random": torch.get_rng_state()}
                torch.save(parts, SAVED.with_suffix(".new"))
                SAVED.with_suffix(".new").replace(SAVED)
            if step % EVALUATE_EVERY == 0:
                task.evaluating(step)
            if step >= STEPS:
                break
    task.finish(model, GROUP)
    manager.shutdown()


def launch(groups: int) -> int:
    """A lighthouse, and a torchrun for each group, as torchft's pages have them."""
    port = free_port()
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    beside = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = subprocess.Popen([beside, *options, "--bind", f"[::]:{port}"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", "--standalone"]
    runs = []
    for group in range(groups):
        mine = {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(groups)}
        mine["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        command = [*torchrun, "--nproc-per-node=1", __file__]
        runs.append(subprocess.Popen(command, env=os.environ | mine))
    signal.signal(signal.SIGTERM, lambda *_: [run.terminate() for run in runs])
    codes = [run.wait() for run in runs]
    lighthouse.kill()
    return max(codes, key=abs)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["groups"]:
        sys.exit(launch(int(sys.argv[2])))
    main()
