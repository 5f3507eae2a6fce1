"""Injects the configured faults into this rank."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.tensors.state import local_part
from kempner.cluster.slurm.hostlist import node_name
from kempner.config.resilience import FLIPPED, FailPoint, Fault, parse_faults
from kempner.config.sections import Config
from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.fail_points import set_fail_point
from kempner.run.record.attempts import read_current
from kempner.training.bit_flips import BitFlip
from kempner.training.rank_link.rank_link import RankLink

VARIABLE = "KEMPNER_FAULTS"
"""Faults besides those of the configuration, separated by semicolons."""

_SMALL_FILE = 64 * 1024
"""Bytes that a file may still have when the disk is "full": printed output may go to a file, too,
and must not fail."""


def arm(config: Config, rank_link: RankLink) -> FaultInjector:
    """The faults of this rank in this attempt, with their fail points set. Call it before the
    rendezvous. Raises `UsageError` if the variable cannot be parsed."""
    texts = [text for text in os.environ.get(VARIABLE, "").split(";") if text.strip()]
    try:
        planned = parse_faults([*config.resilience.faults, *texts])
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {error}") from error
    if rank_link.launch is not None:
        attempt = rank_link.launch.attempt.number
    else:  # the attempt that rank 0 will begin
        current = read_current(rank_link.run.attempts)
        attempt = 1 + (current.number if current else 0)
    if planned and rank_link.world.rank == 0:
        logger().warning("faults will be injected", faults=[fault.text for fault in planned])
    injector = FaultInjector(planned, rank_link.world.rank, attempt, node_name(os.environ))
    injector.set_fail_points()
    return injector


class FaultInjector:
    """The faults of one rank in one attempt."""

    def __init__(self, planned: Sequence[Fault], rank: int, attempt: int, node: str = "") -> None:
        self.planned = [fault.text for fault in planned]
        """The faults of all ranks."""
        self.armed = [fault for fault in planned if fault.is_of(rank, node, attempt)]
        self._lock = threading.Lock()
        self._flips: dict[str, BitFlip] = {}

    def set_fail_points(self) -> None:
        """Set the fail points of saves for which a fault is planned."""
        phases = {fault.phase for fault in self.armed}
        for point in FailPoint:
            handler = partial(self.maybe_inject, point) if point in phases else None
            set_fail_point(point, handler)

    def maybe_inject(self, phase: str, step: int | None = None) -> None:
        """Inject the faults that are due in this phase, or at this point of a save, of this
        step."""
        for fault in self._due(
            ("kill", "stop", "hang", "spin", "strand", "crash", "oom", "hog"), phase, step
        ):
            match fault.kind:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hang":
                    _hang()
                case "spin":
                    _spin()
                case "strand":
                    dist.recv(torch.empty(1))
                case "crash":
                    raise RuntimeError(f"injected fault: {fault.text}")
                case "oom":
                    _ask_for_too_much()
                case "hog":
                    _take_all()

    @contextmanager
    def during_step(self, step: int, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Inject faults around a step's forward and backward pass, the block."""
        self.maybe_inject(Phase.STEP, step)
        for where in FLIPPED:
            for fault in self._due(("flip",), where, step):
                planted = BitFlip(where, round(fault.factor), fault.lasting)
                self._flips.setdefault(fault.text, planted).plant(model, optimizer)
        started, hooks = time.monotonic(), []
        for fault in self._due(("nan", "spike"), Phase.STEP, step):
            factor = math.nan if fault.kind == "nan" else fault.factor
            hooks.append(model.register_forward_hook(_scaling(factor)))
        yield
        for hook in hooks:
            hook.remove()
        for _ in self._due(("nan_gradients",), Phase.STEP, step):
            _poison_one_gradient(model)
        for fault in self._due(("slow",), Phase.STEP, step):
            time.sleep((fault.factor - 1) * (time.monotonic() - started))

    @contextmanager
    def during_save(self, step: int, settle: Callable[[], None]) -> Iterator[None]:
        """Inject faults around a save, which the block starts; `settle` waits for its end."""
        if self._due(("disk_full",), Phase.SAVE, step):
            _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL_FILE, hard))
            yield
            settle()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        else:
            yield
        self.maybe_inject(Phase.SAVE, step)

    def _due(self, kinds: Sequence[str], phase: str, step: int | None) -> list[Fault]:
        """The faults that are due, which are logged; those that happen once are removed."""
        with self._lock:  # a save has threads of its own
            due = [f for f in self.armed if f.kind in kinds and f.covers(phase, step)]
            self.armed = [f for f in self.armed if f not in due or f.lasting]
        for fault in due:
            logger().warning("injecting fault", fault=fault.text, step=step)
        return due


def _hang() -> None:
    while True:
        time.sleep(1)


def _spin() -> None:
    libc = ctypes.PyDLL(None)  # keeps the GIL, which ctypes.CDLL releases
    while True:
        libc.sleep(1_000_000)  # a signal ends it


def _ask_for_too_much() -> None:
    if torch.cuda.is_available():
        torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
    bytearray(1 << 60)


def _take_all() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))


def _scaling(factor: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, given, returned: returned * factor


def _poison_one_gradient(model: nn.Module) -> None:
    gradients = (local_part(p.grad) for p in model.parameters() if p.grad is not None)
    next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = math.nan
