"""Which network interface Gloo and NCCL are to use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_environment(
    configured: str | None,
    on_one_node: bool,
    environ: Mapping[str, str],
    sysfs: Path = Path("/sys/class/net"),
) -> dict[str, str]:
    """Variables to set so that the process groups bind where they should.

    What the user exported wins. On one node Gloo gets the loopback interface: the address that the
    host's name resolves to may belong to a network that is down. Raises `ValueError` with a
    sentence if the configured interface does not exist here.
    """
    if configured is not None and not (sysfs / configured).exists():
        there = ", ".join(sorted(entry.name for entry in sysfs.iterdir()))
        raise ValueError(
            f"distributed.interface={configured} does not exist on this node; it has {there}"
        )
    if configured is not None:
        wanted = dict.fromkeys(_VARIABLES, configured)
    elif on_one_node and (sysfs / "lo").exists():
        wanted = {"GLOO_SOCKET_IFNAME": "lo"}
    else:
        wanted = {}
    return {name: value for name, value in wanted.items() if name not in environ}
