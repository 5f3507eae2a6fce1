"""The configuration files of the lab's Slurm, as text."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kempner.lab.machines import SRUN_PORTS, address
from kempner.run.process.exit_codes import UsageError

LOGIN = "login1"

KILL_WAIT = 30
"""Seconds from Slurm's SIGTERM to its SIGKILL."""

_MEMORY_MB = 16_000


def user_name() -> str:
    """The user who runs the lab, and is Slurm's administrator in it. Raises `UsageError`."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(f"user {os.geteuid()} has no name here, which Slurm needs") from None


@dataclass(frozen=True)
class Options:
    """The options of a cluster; times in seconds. `cred_expire` is also the time before a requeued
    job may start again (Slurm's default is 120). `open_management`: em4 passes all traffic, not
    only Slurm's. `extra` adds or replaces lines of slurm.conf; an empty value removes one."""

    nodes: int = 8
    gpus: int = 4
    cpus: int = 8
    preempt: Literal["partition", "qos"] = "partition"
    grace: int = 20
    slurmd_timeout: int = 30
    cred_expire: int = 5
    open_management: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def node_names(self) -> list[str]:
        return [f"node{k}" for k in range(1, self.nodes + 1)]


def write_configuration(options: Options, folder: Path) -> None:
    files = {
        "hosts": _hosts(options),
        "slurm.conf": _slurm(options, folder),
        "slurmdbd.conf": _slurmdbd(folder),
        # Slurm counts no GPU without device files, and numbers them for CUDA by their names.
        "gres.conf": f"Name=gpu File={folder}/dev/nvidia[0-{options.gpus - 1}]\n"
        if options.gpus
        else "",
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
    }
    for name, text in files.items():
        path = folder / "etc" / name
        path.write_text(text)
        path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)


def _hosts(options: Options) -> str:
    lines = ["127.0.0.1 localhost", f"{address(LOGIN, 'em4')} {LOGIN}"]
    for name in options.node_names:
        # The plain name resolves to the management network, as on most clusters.
        lines += [f"{address(name, 'em4')} {name}", f"{address(name, 'ib0')} {name}-ib"]
    return "\n".join(lines) + "\n"


_FIXED = {
    "ClusterName": "lab",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "LogTimeFormat": "iso8601_ms",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "bf_interval=5,sched_interval=5,batch_sched_delay=0",
    "SlurmdParameters": "config_overrides",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "SlurmctldTimeout": "30",
    "MinJobAge": "3600",
    "JobRequeue": "1",
    "MessageTimeout": "10",
    "TCPTimeout": "2",
    "PreemptMode": "REQUEUE",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageTRES": "gres/gpu",
    "JobAcctGatherType": "jobacct_gather/linux",
    "GresTypes": "gpu",
    "PropagateResourceLimits": "NONE",
}
"""Lines of slurm.conf that are the same in every lab."""


def _slurm(options: Options, folder: Path) -> str:
    settings = {
        **_FIXED,
        "SlurmctldHost": f"{LOGIN}({address(LOGIN, 'em4')})",
        "SlurmUser": user_name(),
        "SlurmdUser": user_name(),
        "AuthInfo": f"socket={folder}/munge/socket,cred_expire={options.cred_expire}",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/spool/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "ProctrackType": _proctrack(),
        "SlurmdTimeout": str(options.slurmd_timeout),
        "KillWait": str(KILL_WAIT),
        "PreemptType": {"partition": "preempt/partition_prio", "qos": "preempt/qos"}[
            options.preempt
        ],
        "AccountingStorageHost": LOGIN,
        "AccountingStoragePass": f"{folder}/munge/socket",
        "SrunPortRange": SRUN_PORTS,
        **options.extra,
    }
    lines = [f"{key}={value}" for key, value in settings.items() if value]
    return "\n".join([*lines, *_nodes(options), *_partitions(options)]) + "\n"


def _proctrack() -> str:
    """Control groups, as on real clusters, if the v1 freezer is writable."""
    there = os.access("/sys/fs/cgroup/freezer", os.W_OK)
    return "proctrack/cgroup" if there else "proctrack/linuxproc"


def _nodes(options: Options) -> list[str]:
    return [
        f"NodeName={name} NodeAddr={address(name, 'em4')} CPUs={options.cpus} "
        f"RealMemory={_MEMORY_MB} Gres=gpu:{options.gpus} State=UNKNOWN"
        for name in options.node_names
    ]


def _partitions(options: Options) -> list[str]:
    """`low`, the default, whose jobs are preempted, and `high`; with `preempt="qos"` the partitions
    do not differ."""
    by_tier = options.preempt == "partition"
    tiers = {
        "low": f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={options.grace}",
        "high": "PriorityTier=10 PreemptMode=OFF",
    }
    return [
        f"PartitionName={name} Nodes={','.join(options.node_names)} MaxTime=UNLIMITED "
        f"DefaultTime=60 Default={'YES' if name == 'low' else 'NO'} {tier if by_tier else ''}"
        for name, tier in tiers.items()
    ]


def _slurmdbd(folder: Path) -> str:
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket",
        "DbdHost": LOGIN,
        "DbdAddr": address(LOGIN, "em4"),
        "SlurmUser": user_name(),
        "LogFile": f"{folder}/log/slurmdbd.log",
        "PidFile": f"{folder}/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StorageUser": "slurm",
        "StoragePass": "lab",
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
