"""Checks on a GPU what tests on CPU cannot see: one command, a few minutes, one table.

    python benchmarks/models/gpu.py [--device cuda] [--dim 1024] [--layers 8] [--seq 1024]

With `--device cpu --dim 32 --layers 2 --seq 32` it tries itself: what only a GPU can show is passed
over, and the table says so. Exit code 1 if a check failed. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors import state
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.model.spec.memory import estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape, flops_per_token
from kempner.model.transformer import Transformer
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory
from kempner.training.compute.any_shard import exact_norm
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.observe.metrics import AsyncMetrics, peak_flops

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

VOCABULARY = 8192


class PassedOverError(Exception):
    """A check that this machine cannot make; says why."""


@dataclass(frozen=True)
class Bench:
    """What every check starts from."""

    device: torch.device
    config: Config
    folder: Path

    def start(self, dtype: str = "auto") -> Trained:
        """A new model with its optimizer, the same every time."""
        train = self.config.train.model_copy(update={"dtype": dtype})
        config = self.config.model_copy(update={"train": train})
        model = build_model(config, VOCABULARY, self.device, None)
        return Trained(self, model, build_optimizer(model, config.optimizer))

    def need_gpu(self, why: str) -> None:
        """Raise `PassedOverError` on a CPU."""
        if self.device.type != "cuda":
            raise PassedOverError(why)


@dataclass
class Trained:
    """A model in training."""

    bench: Bench
    model: Transformer
    optimizer: Optimizer

    def batch(self, step: int) -> MicroBatch:
        """That of a step, as the loader delivers it."""
        train = self.bench.config.train
        source = torch.Generator().manual_seed(step)
        sizes = (train.micro_batch_size, train.seq_len + 1)
        tokens = torch.randint(VOCABULARY, sizes, generator=source)
        parts = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.bench.device.type == "cuda":
            return MicroBatch(*(part.pin_memory() for part in parts))
        return MicroBatch(*parts)

    def gradient(self, step: int, batch: MicroBatch | None = None) -> Tensor:
        """Forward and backward; the loss."""
        batches = [batch or self.batch(step)]
        device = self.bench.device
        return StepGradient(self.model, device, seed=0, rank=0).add(batches, step)

    def step(self, step: int, batch: MicroBatch | None = None) -> Tensor:
        """A whole step; its loss."""
        loss = self.gradient(step, batch)
        norm = update(self.model, self.optimizer, loss, 1e-3, 1.0)
        AsyncMetrics().send(TrainState(step=step), loss, norm, 1e-3)
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the whole state."""
        table = state.capture(self.model, self.optimizer)
        return {key: tensor.detach().cpu().clone() for key, tensor in table.items()}

    def manager(self, name: str) -> CheckpointEngine:
        """Saves to, and restores from, the run of this name."""
        run = RunDirectory(self.bench.folder / name)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        identity = Identity(1, {"fsdp": 1}, 0, "", {})
        fence = Fence(run.attempts, begin_attempt(run))
        group = dist.new_group(backend="gloo")
        context = CheckpointContext(run.checkpoints, identity, fence, group)
        return CheckpointEngine(context, self.model, self.optimizer, keep=Keep(last=2))


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The keys of what is not the same to the bit."""
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


def staging(bench: Bench) -> str:
    """A checkpoint holds the step it was asked for at, though training went on at once."""
    trained = bench.start()
    trained.step(1)
    for step in range(2, 6):
        manager = trained.manager(f"staging-{step}")
        before = trained.tensors()
        manager.save(TrainState(step=step))
        loss = trained.gradient(step)
        manager.release_staging()
        update(trained.model, trained.optimizer, loss, 1e-1, 1.0)
        manager.join()
        fresh = bench.start()
        assert fresh.manager(f"staging-{step}").restore() is not None, "no checkpoint"
        assert not (torn := differing(before, fresh.tensors())), f"step {step}: {torn[:3]}"
        assert differing(before, trained.tensors()), "the optimizer did not race"
    return "4 saves, each equal to the bit"


def pinned(bench: Bench) -> str:
    """The staging buffer is page-locked, before the first save."""
    bench.need_gpu("pages are locked for a GPU")
    trained = bench.start()
    manager = trained.manager("pinned")
    trained.step(1)
    manager.release_staging()
    manager.save(TrainState(step=1))
    manager.join()
    image = manager._saver._routes._image
    assert image is not None
    assert all(view.is_pinned() for view in image.views if view.numel()), "pageable"
    return f"{len(image.content) / 2**20:.0f} MiB"


def deterministic_resume(bench: Bench) -> str:
    """Four steps are the same bits with a stop between them as without."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    try:
        whole, first, second = bench.start(), bench.start(), bench.start()
        for step in range(1, 5):
            whole.step(step)
        manager = first.manager("resume")
        for step in range(1, 3):
            first.step(step)
        manager.save(TrainState(step=2))
        manager.join()
        assert second.manager("resume").restore() is not None, "no checkpoint"
        for step in range(3, 5):
            second.step(step)
    finally:
        torch.set_deterministic_debug_mode("default")
    assert not (other := differing(whole.tensors(), second.tensors())), f"differ: {other[:3]}"
    return "equal to the bit"


def no_sync(bench: Bench) -> str:
    """A good step never makes the host wait."""
    bench.need_gpu("tests/unit/training/gpu/test_no_sync.py has what a CPU can show")
    trained = bench.start()
    batches = [trained.batch(step) for step in range(1, 5)]
    trained.step(1, batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 5):
            trained.step(step, batches[step - 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "3 steps"


def memory(bench: Bench) -> str:
    """A step needs at most what is estimated, to a tenth."""
    bench.need_gpu("a CPU does not count its tensors")
    train = bench.config.train
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trained = bench.start()
    trained.step(1)
    torch.cuda.reset_peak_memory_stats()
    trained.step(2)
    most = torch.cuda.max_memory_allocated() - before
    shape = Shape.of(bench.config.model, VOCABULARY)
    expected = estimate_memory(bench.config, shape, MeshDegrees(), compute_bytes=2)
    assert most <= 1.1 * expected.total, f"{most / 2**20:.0f}, not {expected.total / 2**20:.0f} MiB"
    return f"{most / 2**20:.0f} of {expected.total / 2**20:.0f} MiB ({train.micro_batch_size} rows)"


def speed(bench: Bench) -> str:
    """Model FLOPs utilization, of a known GPU; it fails nothing."""
    bench.need_gpu("the peak of a CPU is not known")
    trained = bench.start()
    batch, train = trained.batch(1), bench.config.train
    for step in range(1, 4):
        trained.step(step, batch)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for step in range(4, 14):
        trained.step(step, batch)
    torch.cuda.synchronize()
    took = (time.perf_counter() - started) / 10
    shape = Shape.of(bench.config.model, VOCABULARY)
    work = train.micro_batch_size * train.seq_len * flops_per_token(shape, train.seq_len)
    peak = peak_flops(bench.device, 1)
    return f"{took * 1e3:.1f} ms a step" + (f", MFU {work / took / peak:.1%}" if peak else "")


def stop(bench: Bench) -> str:
    """From a signal in the middle of training to the commit of the step it came in."""
    trained = bench.start()
    manager = trained.manager("stop")
    told: list[float] = []
    old = signal.signal(signal.SIGTERM, lambda *_: told.append(time.perf_counter()))
    try:
        step = 0
        while not told:
            step += 1
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            trained.step(step)
        manager.save(TrainState(step=step))
        manager.join()
    finally:
        signal.signal(signal.SIGTERM, old)
    assert manager.committed_step == step, "no commit"
    return f"{time.perf_counter() - told[0]:.2f} s"


def bf16(bench: Bench) -> str:
    """Twenty steps on one batch in bfloat16 learn what those in float32 do."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        trained = bench.start(dtype)
        batch = trained.batch(1)
        for step in range(1, 21):
            loss = trained.step(step, batch)
        losses[dtype] = loss.item()
    exact, rounded = losses["float32"], losses["bfloat16"]
    assert abs(rounded - exact) < 0.05 * exact, f"loss {rounded:.3f}, not {exact:.3f}"
    return f"loss {rounded:.3f}, in float32 {exact:.3f}"


def any_world(bench: Bench) -> str:
    """With train.same_on_any_world a slot's gradient does not depend on what was computed before
    it, and neither a norm nor an update on where shards end."""
    group = dist.group.WORLD
    assert group is not None
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    try:
        trained = bench.start()
        orders = [{slot: _of_slot(trained, slot) for slot in order} for order in ([1, 2], [2, 1])]
        for slot, first in orders[0].items():
            for one, other in zip(first, orders[1][slot], strict=True):
                assert torch.equal(one, other), f"slot {slot} has another gradient"
        whole = orders[0][1]
        pieces = [piece for each in whole for piece in each.tensor_split(3)]
        assert torch.equal(exact_norm(whole, group), exact_norm(pieces, group)), "the norm differs"
        updated = [_updated(bench, gradients) for gradients in (whole, pieces)]
        assert torch.equal(*updated), "the update differs"
    finally:
        torch.set_deterministic_debug_mode("default")
    return f"{len(whole)} tensors, equal to the bit"


def _of_slot(trained: Trained, slot: int) -> list[Tensor]:
    trained.optimizer.zero_grad()
    trained.gradient(slot)
    gradients = [parameter.grad for parameter in trained.model.parameters()]
    return [gradient.clone() for gradient in gradients if gradient is not None]


def _updated(bench: Bench, gradients: list[Tensor]) -> Tensor:
    """All elements after three updates by these gradients."""
    parameters = nn.ParameterList([nn.Parameter(each.clone()) for each in gradients])
    optimizer = build_optimizer(parameters, bench.config.optimizer, any_shard=True)
    optimizer.found_inf = torch.zeros((), device=bench.device)  # type: ignore[attr-defined]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    for _ in range(3):
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


CHECKS: list[Callable[[Bench], str]] = [
    staging,
    pinned,
    deterministic_resume,
    no_sync,
    memory,
    speed,
    stop,
    bf16,
    any_world,
]


def main() -> int:
    """Make every check; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    records.add_option(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu shows what can be seen without", file=sys.stderr)
        return 1
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    sizes = ModelSection(
        dim=args.dim, n_layers=args.layers, n_heads=max(1, args.dim // 64), max_seq_len=args.seq
    )
    train = TrainSection(seq_len=args.seq, micro_batch_size=4)
    failed, rows = 0, list[dict[str, object]]()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, Config(model=sizes, train=train), Path(folder))
        for check in CHECKS:
            started = time.perf_counter()
            try:
                verdict, words = "passed", check(bench)
            except PassedOverError as error:
                verdict, words = "not here", str(error)
            except Exception as error:  # noqa: BLE001 - the others are made all the same
                failed += 1
                verdict, words = "FAILED", f"{type(error).__name__}: {error}"
                traceback.print_exc()
            took = time.perf_counter() - started
            row = {"check": check.__name__, "GPU": name, "verdict": verdict}
            rows.append(row | {"found": words, "s": took})
            print(f"{check.__name__}: {verdict}", file=sys.stderr, flush=True)
    records.result(args.record, "GPU", ("kempner/checkpoint", "kempner/training"), rows, "check")
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
