"""What GPUs can do, by their makers' data sheets, and what is taken to be reached of such peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: part of the name by which its driver calls it, or what it is known by.
        memory: bytes, as sold: 80 GB are 80e9.
        flops: dense bfloat16 products, FLOP/s.
        memory_rate: bytes/s that it reads or writes.
        link_rate: bytes/s that it sends to GPUs of its node, in one direction.
        source: where the figures are from.
    """

    name: str
    memory: int
    flops: float
    memory_rate: float
    link_rate: float
    source: str


_GB = 10**9
_ALL = (
    Gpu("A100-40GB", 40 * _GB, 312e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM, 2021"),
    Gpu("A100-80GB", 80 * _GB, 312e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM, 2021"),
    Gpu("H100", 80 * _GB, 989e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM, 2024"),
    Gpu("H200", 141 * _GB, 989e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM, 2024"),
    Gpu("B200", 180 * _GB, 2250e12, 8e12, 900e9, "NVIDIA DGX B200 data sheet, 2024"),
    Gpu("L40S", 48 * _GB, 362e12, 0.864e12, 32e9, "NVIDIA L40S data sheet, 2023; PCIe 4.0 x16"),
    Gpu("MI300X", 192 * _GB, 1307e12, 5.3e12, 448e9, "AMD Instinct MI300X data sheet, 2023"),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""By name."""
_SHORT = {"A100": "A100-80GB"}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, in any case; "A100" is that of 80 GB.

    Raises `UsageError`, with the names that there are.
    """
    wanted = name.upper()
    wanted = _SHORT.get(wanted, wanted)
    by_name = {known.upper(): gpu for known, gpu in GPUS.items()}
    if wanted in by_name:
        return by_name[wanted]
    close = get_close_matches(wanted, by_name, 1)
    meant = f"; did you mean {by_name[close[0]].name}?" if close else ""
    raise UsageError(f"no figures are known of the GPU {name}, only of {', '.join(GPUS)}{meant}")


def peak_flops_of(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its driver's name for it; None if it is not known."""
    for gpu in GPUS.values():
        if gpu.name.partition("-")[0] in device_name:
            return gpu.flops
    return None


@dataclass(frozen=True)
class Assumptions:
    """What cannot be traced. Rates are of one direction.

    Attributes:
        network: bytes/s that a node sends to others, of all its adapters together.
        storage: bytes/s at which all ranks together write a checkpoint.
        to_host: bytes/s at which a rank copies its state to its host, which holds up training.
        node_failure: seconds between two failures of one node. Llama 3 counted 419 interruptions in
            54 days on 2,048 nodes (arXiv:2407.21783, section 3.3.4): one in 264 days.
        compute_share, memory_share, network_share: of the peak figures that are reached.
    """

    network: float = 400e9 / 8
    storage: float = 5e9
    to_host: float = 20e9
    node_failure: float = 264 * 86_400.0
    compute_share: float = 0.7
    memory_share: float = 0.8
    network_share: float = 0.8


DEFAULTS = Assumptions()
