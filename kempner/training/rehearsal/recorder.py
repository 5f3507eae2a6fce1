"""Records the steps of a rank in a rehearsal, and stops or kills the rank as planned.

A step is two JSON lines, for its start and its results; computations between two steps have a line
of their own. Batches, losses, rates and gradients come from torch's global hooks, files and hosts
from Python's audit hooks, so that nothing need be known about the program.

Recorded variables are the locals of the program's active functions, the globals of its modules, and
what they refer to: modules, optimizers, schedulers, generators, numbers, containers and objects of
the program's classes. Digests are equal if and only if all bits are.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

import kempner
from kempner.run.control.rehearsal import RehearsalPart

ROWS = 4096
"""Most samples of a batch that get a digest each."""


def of_bytes(*parts: bytes) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """Digest of type, shape and bits; for a sharded tensor, of this rank's part."""
    return of_bytes(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), _bits(tensor))


def of_rows(tensor: Tensor) -> list[str]:
    """Digests of the samples of a batch, or one of the whole tensor."""
    if tensor.dim() == 0 or not 0 < len(tensor) <= ROWS:
        return [of_tensor(tensor)]
    bits = _bits(tensor)
    size = len(bits) // len(tensor)
    return [of_bytes(bits[n * size : (n + 1) * size]) for n in range(len(tensor))]


def of_state(value: Any) -> str:
    """Digest of a state as in a `state_dict`: numbers, tensors and containers of them."""
    return of_bytes(*_pieces(value))


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []


def _pieces(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        yield of_tensor(value).encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes() if value.dtype != object else repr(value).encode()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield f"{key!r}:".encode()
            yield from _pieces(entry)
    elif isinstance(value, list | tuple):
        yield f"({len(value)}".encode()
        for entry in value:
            yield from _pieces(entry)
    elif isinstance(value, int | float | complex | str | bytes | type(None)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


def _bits(tensor: Tensor) -> bytes:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_meta or local.layout is not torch.strided or local.is_quantized:
        return str(tuple(local.shape)).encode()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    flat = local.cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""


@dataclass
class ComputedStep:
    """The computation since the step began."""

    samples: list[str] = field(default_factory=list)
    """Digests of the samples that a model got in training, in order."""
    losses: list[float] = field(default_factory=list)
    """The tensors of `backward` calls."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    evaluation: list[str] = field(default_factory=list)
    """Digests of a model's inputs and outputs during evaluation."""
    torch_generator: str = ""
    """Digest of torch's generator at the first call of a model."""
    batches: int = 0
    """Number of `backward` calls."""


class TorchHooks:
    """Records the computation in `now`. `name_of` returns the program's name of an object."""

    def __init__(self, name_of: Callable[[object], str]) -> None:
        self.now = ComputedStep()
        self.optimizers: dict[int, Optimizer] = {}
        """The optimizers that have stepped, by `id`."""
        self.on_optimizer: Callable[[], None] = lambda: None
        self._name_of, self._depth = name_of, 0

    def install(self) -> None:
        """Register the hooks until the process ends."""
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        backward = torch.autograd.backward

        def noting(tensors: Any, *arguments: Any, **options: Any) -> None:
            self._note_losses(tensors)
            backward(tensors, *arguments, **options)

        torch.autograd.backward = noting

    def weights(self) -> dict[str, str]:
        """A digest of each optimizer's parameters, by its name."""
        return {
            self._name_of(optimizer): of_state(
                [p for g in optimizer.param_groups for p in g["params"]]
            )
            for optimizer in self.optimizers.values()
        }

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not self.now.torch_generator:
            self.now.torch_generator = of_tensor(torch.default_generator.get_state())

    def _leave(self, module: nn.Module, arguments: Any, options: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or torch.compiler.is_compiling():
            return
        given = tensors_in([arguments, options])
        if not torch.is_grad_enabled():
            returned = tensors_in(result if not hasattr(result, "to_tuple") else result.to_tuple())
            self.now.evaluation.append(of_state([given, returned]))
            return
        for tensor in given:
            if tensor.grad_fn is None and not tensor.requires_grad:
                self.now.samples += of_rows(tensor)

    def _note_losses(self, tensors: Any) -> None:
        self.now.batches += 1
        for tensor in tensors_in([tensors]):
            if tensor.numel() == 1:
                self.now.losses.append(float(tensor.detach()))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        name = self._name_of(optimizer)
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self.now.rates[name] = rates

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # After the step, since a closure computes the gradients in it.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad if isinstance(p.grad, Tensor) else None for p in parameters]
        self.now.gradients[self._name_of(optimizer)] = of_state(gradients)
        self.on_optimizer()


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
MOST_FILES = 500
"""Most names kept of each kind."""


class ExternalAccess:
    """Keeps the names of opened files and contacted hosts, from `watch` to the end of the
    process."""

    def __init__(self, inside: Path) -> None:
        self._inside = f"{inside}/"
        self.written: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.called: dict[str, None] = {}

    def watch(self) -> None:
        """Add an audit hook for files and connections; it cannot be removed."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
            if isinstance(path, str | bytes | os.PathLike) and not unnamed:
                self.opened(os.fsdecode(path), bool(flags & _WRITES))
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and len(address) > 1:
                self._call(str(address[0]), address[1])

    def opened(self, path: str, for_writing: bool) -> None:
        full = os.path.abspath(path)  # noqa: PTH100 - does not resolve links
        if full.startswith((self._inside, *_NOT_FILES)) or full.endswith((".py", ".pyc", ".so")):
            return
        names = self.written if for_writing else self.read
        if len(names) < MOST_FILES and not Path(full).is_dir():  # a file without a name
            names[full] = None

    def _call(self, host: str, port: int) -> None:
        if not host.startswith("127.") and host not in ("::1", "localhost", "0.0.0.0", "::"):
            self.called[f"{host}:{port}"] = None


DEEPEST = 5
"""Most references from a variable to a visited object."""

MOST_VARIABLES = 4000
"""Most recorded entries; further ones are ignored."""

MOST_OF_ONE = 64
"""Largest container whose entries are visited one by one."""

Seen = tuple[str, str, str]
"""Kind, digest, and description."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


_PATHS = sysconfig.get_paths()
_LIBRARIES = (
    *{f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{Path(kempner.__file__).parent}/",
)
"""Folders of code that is not the program's."""


@cache
def is_programs(file: str | None) -> bool:
    if not file:
        return False
    path = str(Path(file).absolute())  # as in `python train.py`
    if path.startswith(_LIBRARIES):
        return False
    if "/site-packages/" in path or "/dist-packages/" in path:  # another environment
        return False
    return path.endswith(".py") and Path(path).is_file()


_KNOWN_CLASSES: dict[type[Any], bool] = {}


def _is_programs_class(kind: type[Any]) -> bool:
    if kind not in _KNOWN_CLASSES:
        _KNOWN_CLASSES[kind] = any(_is_programs_own(base) for base in kind.__mro__)
    return _KNOWN_CLASSES[kind]


def _is_programs_own(kind: type[Any]) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_programs(getattr(module, "__file__", None))


def look(frame: FrameType) -> Walk:
    """All variables of the program, from the frame of a call that it has made."""
    walk = Walk()
    modules: dict[str, Mapping[str, Any]] = {}
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if is_programs(code.co_filename):
            walk.files.add(str(Path(code.co_filename).resolve()))
            if at.f_locals is not at.f_globals:
                walk.all_of("", at.f_locals)
            modules.setdefault(code.co_filename, at.f_globals)
        else:
            for value in list(at.f_locals.values()):
                if isinstance(value, nn.Module | Optimizer) or _is_programs_class(type(value)):
                    walk.visit(type(value).__name__, value, 0)
        at = at.f_back
    for variables in modules.values():
        walk.all_of("", variables)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if is_programs(file) and file not in modules:
            walk.files.add(str(Path(str(file)).resolve()))
            walk.all_of(f"{name.rpartition('.')[2]}.", vars(module))
    return walk


class Walk:
    """Visits variables and what they refer to, each object once."""

    def __init__(self) -> None:
        self.found: dict[str, Seen] = {}
        self.names: dict[int, str] = {}
        """The names of visited objects, by `id`."""
        self.files: set[str] = set()
        self.iterators: list[str] = []
        """Loaders and iterators, whose position cannot be read."""

    def all_of(self, prefix: str, variables: Mapping[str, Any]) -> None:
        for name, value in list(variables.items()):
            if not name.startswith("__") and not isinstance(value, ModuleType | type):
                self.visit(f"{prefix}{name}", value, 0)

    def visit(self, name: str, value: Any, depth: int) -> None:
        if depth > DEEPEST or len(self.found) >= MOST_VARIABLES:
            return
        if isinstance(value, _PLAIN):
            self.found.setdefault(name, ("value", repr(value), _short(value)))
            return
        if id(value) in self.names:
            return
        self.names[id(value)] = name
        if isinstance(value, Mapping):
            self._mapping(name, value, depth)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            self._sequence(name, value, depth)
        elif isinstance(value, nn.Module):
            self._module(name, value, depth)
        elif isinstance(value, Optimizer):
            self._optimizer(name, value)
        elif (seen := _leaf(value)) is not None:
            self.found[name] = seen
        else:
            self._object(name, value, depth)

    def _mapping(self, name: str, value: Mapping[Any, Any], depth: int) -> None:
        self.found[name] = ("container", of_state(value), f"{len(value)} entries")
        if len(value) <= MOST_OF_ONE:
            for key, entry in list(value.items()):
                self._entry(f"{name}[{key!r}]", entry, depth)

    def _sequence(self, name: str, value: Any, depth: int) -> None:
        entries = list(value)
        kind = "set" if isinstance(value, set | frozenset) else "container"
        self.found[name] = (kind, of_state(entries), f"{len(entries)} entries")
        if len(entries) <= MOST_OF_ONE:
            for number, entry in enumerate(entries):
                self._entry(f"{name}[{number}]", entry, depth)

    def _entry(self, name: str, value: Any, depth: int) -> None:
        """Visit an entry of a container, unless the container's digest covers it."""
        if not isinstance(value, (*_PLAIN, Tensor, np.ndarray)):
            self.visit(name, value, depth + 1)

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        tensors: list[tuple[str, str, Tensor]] = [
            *((of, "weight", tensor) for of, tensor in module.named_parameters()),
            *((of, "buffer", tensor) for of, tensor in module.named_buffers()),
        ]
        self.found[f"{name}.names"] = ("names", of_state([of for of, _, _ in tensors]), "")
        for of, kind, tensor in tensors:
            self.found[f"{name}.{of}"] = (kind, of_tensor(tensor), str(tuple(tensor.shape)))
            self.names.setdefault(id(tensor), f"{name}.{of}")
        for place, part in module.named_modules():
            self.names.setdefault(id(part), f"{name}.{place}")
            if _is_programs_class(type(part)):
                own = f"{name}.{place}".rstrip(".")
                self._attributes(own, part, depth)

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        state = [optimizer.state.get(p) for g in optimizer.param_groups for p in g["params"]]
        self.found[name] = ("optimizer", of_state(state), type(optimizer).__name__)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        rates = ", ".join(f"{float(group.get('lr', 0)):.4g}" for group in groups)
        self.found[f"{name}.param_groups"] = ("groups", of_state(groups), rates)

    def _object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, DataLoader):
            self.iterators.append(name)
            for attribute in ("generator", "sampler", "dataset"):
                self.visit(f"{name}.{attribute}", getattr(value, attribute), depth + 1)
        elif hasattr(type(value), "__next__"):
            self.iterators.append(name)
        elif _is_programs_class(type(value)):
            self._attributes(name, value, depth)
        elif hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict"):
            self.found[name] = ("object", of_state(value.state_dict()), type(value).__name__)

    def _attributes(self, name: str, value: Any, depth: int) -> None:
        # A class may hold an attribute's initial value: `seen = 0`, later `self.seen += 1`.
        own = [vars(kind) for kind in reversed(type(value).__mro__) if _is_programs_own(kind)]
        first = {n: v for names in own for n, v in names.items() if isinstance(v, _PLAIN)}
        held = {name: first[name] for name in first if not name.startswith("__")}
        for attribute, entry in {**held, **getattr(value, "__dict__", {})}.items():
            if attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if not callable(entry) or isinstance(entry, nn.Module):
                self.visit(f"{name}.{attribute}", entry, depth + 1)


def _leaf(value: Any) -> Seen | None:
    """Record a value that refers to no other; None if it may."""
    if isinstance(value, Tensor):
        return "tensor", of_tensor(value), _short(value)
    if isinstance(value, np.ndarray | np.generic):
        return "tensor", of_state(np.asarray(value)), str(value.shape)
    if isinstance(value, torch.Generator):
        return "generator", of_tensor(value.get_state()), "torch.Generator"
    if isinstance(value, random.Random):
        return "generator", of_state(value.getstate()), "random.Random"
    if isinstance(value, np.random.Generator):
        return "generator", of_state(value.bit_generator.state), "numpy Generator"
    if isinstance(value, np.random.RandomState):
        return "generator", of_state(value.get_state()), "numpy RandomState"
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler", of_state(value.state_dict()), type(value).__name__
    return None


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else str(tuple(value.shape))
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


STOPPED_WITHIN = 10.0
"""Seconds within which a SIGTERM must become a request to stop."""


class Recorder:
    """Records the steps of one rank."""

    def __init__(self, part: RehearsalPart) -> None:
        self._part, self._step = part, 0
        rank = int(os.environ.get("RANK", "0"))
        self._disturbs = rank == 0
        self._file = open(Path(part.folder) / f"rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._names: dict[int, str] = {}
        self._outside = ExternalAccess(Path(part.run).parent)
        self._outside.watch()
        self._watch_saves()
        self._hooks = TorchHooks(self._name_of)
        self._hooks.install()
        self._hooks.on_optimizer = self._kill

    def begin_step(self, step: int, asked_to_stop: Callable[[], bool]) -> None:
        """Record the start of a step; called by the loop."""
        self._write_between()
        seen = look(sys._getframe(1))
        self._names = seen.names
        for optimizer in self._hooks.optimizers.values():
            self._names.setdefault(id(optimizer), type(optimizer).__name__)
        self._step, self._hooks.now = step, ComputedStep()
        generators = {"numpy": np.random.get_state(), "random": random.getstate()}
        self._write(
            {
                "began": step,
                "variables": seen.found,
                "iterators": seen.iterators,
                "files": sorted(seen.files),
                "globals": {name: of_state(state) for name, state in generators.items()},
            }
        )
        if self._disturbs and not self._part.kills and step == self._part.at:
            self._stop(asked_to_stop)

    def end_step(self, step: int) -> None:
        now, self._hooks.now = self._hooks.now, ComputedStep()
        self._write({"ended": step, **asdict(now), "weights": self._hooks.weights()})
        self._kill()

    def saved(self, step: int) -> None:
        self._write({"saved": step})

    def left(self) -> None:
        self._write_between()

    def _write_between(self) -> None:
        """Write what was computed since the last step ended."""
        if self._hooks.now.evaluation:
            self._write({"after": self._step, "evaluation": self._hooks.now.evaluation})
            self._hooks.now = ComputedStep()
        outside = self._outside
        accesses = {"wrote": outside.written, "read": outside.read, "called": outside.called}
        self._write({name: list(names) for name, names in accesses.items()})

    def _stop(self, asked_to_stop: Callable[[], bool]) -> None:
        """Signal this process, and wait until the request is known, before this step's vote."""
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + STOPPED_WITHIN
        while not asked_to_stop() and time.monotonic() < until:
            time.sleep(0.001)

    def _kill(self) -> None:
        if self._disturbs and self._part.kills and self._step >= self._part.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _watch_saves(self) -> None:
        """Record torch.save's files, which it opens in native code, without an audit event."""
        save = torch.save

        def noting(value: Any, f: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(f, str | os.PathLike):
                self._outside.opened(os.fspath(f), for_writing=True)
            save(value, f, *arguments, **options)

        torch.save = noting  # type: ignore[assignment]

    def _name_of(self, optimizer: object) -> str:
        return self._names.get(id(optimizer), type(optimizer).__name__)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
