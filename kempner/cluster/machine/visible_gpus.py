"""Which GPUs a process may see, by its environment."""

from __future__ import annotations

from collections.abc import Mapping


def own_part(environ: Mapping[str, str], local_rank: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES should be for a rank among parts of GPUs (MIG); None to leave it.

    A CUDA process sees only the first part of those that it is shown, so each rank must be shown
    its own: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA device enumeration").
    """
    shown = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(shown) < 2 or not all(device.startswith("MIG-") for device in shown):
        return None
    return shown[local_rank] if local_rank < len(shown) else None
