"""Configuration of how ranks reach each other: interface, time-out, NCCL, CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kempner.config.section import (
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)


class NcclSection(Section):
    """NCCL's environment variables; one that is already exported takes precedence."""

    ib_disable: bool | None = None
    """NCCL_IB_DISABLE: keep NCCL off InfiniBand."""
    net_gdr_level: Annotated[Annotated[int, Field(ge=0, le=5)] | None, Key("level", 2)] = None
    """NCCL_NET_GDR_LEVEL: how far apart GPU and adapter may be for direct transfers."""
    ib_gid_index: Annotated[NonNegativeInt | None, Key("index", 3)] = None
    """NCCL_IB_GID_INDEX: 3 is usual for RoCE v2; InfiniBand itself needs none."""
    nvls_enable: bool | None = None
    """NCCL_NVLS_ENABLE: reduce inside of NVSwitch; off saves memory on each GPU."""
    buffsize: Annotated[PositiveInt | None, Key("bytes", 8_388_608)] = None
    """NCCL_BUFFSIZE: bytes of the buffers between each two GPUs; a power of two."""
    debug: Annotated[
        Literal["VERSION", "WARN", "INFO", "TRACE"] | None,
        Key(
            values={
                "VERSION": "its version, at the start",
                "WARN": "errors, and what led to them",
                "INFO": "also how it set itself up: interfaces, rings, channels",
                "TRACE": "also every call; only in builds that have it",
            }
        ),
    ] = None
    """NCCL_DEBUG: how much NCCL tells."""

    def environment(self) -> dict[str, str]:
        """The variables that are set here."""
        return {
            f"NCCL_{name.upper()}": value if isinstance(value, str) else str(int(value))
            for name, value in self
            if value is not None
        }


class DistributedSection(Section):
    """How the ranks reach each other."""

    interface: Annotated[Text | None, Key(example="ib0")] = None
    """Network interface for Gloo and NCCL. Default: loopback on one node; on several nodes the
    InfiniBand or other fabric interface of each, or with a warning the one that leads to rank 0."""
    nccl: NcclSection = NcclSection()
    """NCCL settings; NCCL's own defaults where not set."""
    timeout: Annotated[PositiveFloat, Key("seconds", 3600.0)] = 1800.0
    """Seconds after which a collective that waits for a peer fails."""
    avoid_record_streams: bool | None = None
    """TORCH_NCCL_AVOID_RECORD_STREAMS: collectives keep their tensors themselves; less memory. As
    torch has it by default."""
    cuda_device_max_connections: Annotated[PositiveInt | None, Key("queues", 1)] = None
    """CUDA_DEVICE_MAX_CONNECTIONS: queues between a process and its GPU; 1 keeps the order of
    kernels, as some overlap of tensor parallelism wants."""
    expandable_segments: bool | None = None
    """expandable_segments in PYTORCH_CUDA_ALLOC_CONF: less memory is lost to gaps. What else is
    exported there stays."""

    def environment(self, exported: Mapping[str, str]) -> dict[str, str]:
        """The variables to add to those that are `exported`, of which none is overwritten."""
        wanted = self.nccl.environment()
        if self.avoid_record_streams is not None:
            wanted["TORCH_NCCL_AVOID_RECORD_STREAMS"] = str(int(self.avoid_record_streams))
        if self.cuda_device_max_connections is not None:
            wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = str(self.cuda_device_max_connections)
        added = {name: value for name, value in wanted.items() if name not in exported}
        allocator = exported.get(_ALLOCATOR, "")
        if self.expandable_segments is not None and _SEGMENTS not in allocator:
            own = f"{_SEGMENTS}:{self.expandable_segments}"
            added[_ALLOCATOR] = f"{allocator},{own}" if allocator else own
        return added


_ALLOCATOR, _SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"
