"""The plain loop under NVRx's ft_launcher, which it sends a heartbeat in each step."""

from __future__ import annotations

import plain_loop
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient


def main() -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    plain_loop.main(plain_loop.Keeper(), client.send_heartbeat)
    client.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
