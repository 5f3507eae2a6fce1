"""Two ranks that no launcher has placed: the program itself makes the process group."""

import os
import signal
import sys
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
    del os.environ[name]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from kempner import CheckpointManager, ShutdownHandler  # noqa: E402
from kempner.checkpoint.format.manifest import read  # noqa: E402

folder = Path(sys.argv[1])
dist.init_process_group(
    "gloo", init_method=f"file://{folder / 'meeting'}", rank=RANK, world_size=WORLD
)


def same_on_all(value: object) -> bool:
    told: list[object] = [None] * WORLD
    dist.all_gather_object(told, value)
    return told == [value] * WORLD


def loop(save: bool) -> int:
    """How many steps were made until the ranks stopped; the last of them is signalled at 3."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = None
    if save:
        torch.nn.init.constant_(model.weight, 1.0)
        torch.nn.init.constant_(model.bias, 0.0)
        manager = CheckpointManager(folder / "run", model, optimizer)
        assert manager.restore() is None
    step = 0
    try:
        with ShutdownHandler() as shutdown:
            while True:
                step += 1
                if step == 3 and RANK == WORLD - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if shutdown.should_shutdown():
                    if manager is None:
                        break
                    manager.save(step)
                    raise AssertionError("a save that answers a stop ends the loop")
    except SystemExit as ended:
        if ended.code == 75:
            return step
    raise AssertionError("a stop has another exit code than an end")


for save in (False, True):
    steps = loop(save)
    assert steps >= 3
    assert same_on_all(steps)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
manifest = read(folder / "run" / "checkpoints" / f"step-{steps:08}")
assert manifest.identity.world == WORLD
assert manifest.train_state.step == steps
dist.barrier()
print("has seen it all", flush=True)
