"""Ray Train: TorchTrainer with FailureConfig, a checkpoint reported every few steps."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def work(_: dict[str, Any]) -> None:
    """What each worker does; the variables of a rank are Ray's to set."""
    import ray.train

    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    os.environ["WORLD_SIZE"] = str(ray.train.get_context().get_world_size())
    sys.path.insert(0, str(Path(__file__).parent))
    import plain_loop
    import torch
    from shape import SAVE_EVERY

    class Reported(plain_loop.Keeper):
        """Ray keeps what rank 0 reports."""

        def restore(self, run: plain_loop.Run) -> None:
            if checkpoint := ray.train.get_checkpoint():
                with checkpoint.as_directory() as folder:
                    run.take(torch.load(Path(folder, "state.pt"), weights_only=False))

        def after_step(self, run: plain_loop.Run, stopping: bool) -> None:
            if not stopping and run.done % SAVE_EVERY:
                return
            state = run.state()
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder, "state.pt"))
                mine = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": run.done}, mine if plain_loop.RANK == 0 else None)

    plain_loop.main(Reported())


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = os.environ["PEERS_FOLDER"]
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": passed_on()})
    TorchTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1])),
        run_config=RunConfig(
            name="run", storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


def passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PEERS_")}


if __name__ == "__main__":
    main()
