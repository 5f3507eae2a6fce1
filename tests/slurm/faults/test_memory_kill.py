"""The kernel kills a rank that needs more memory than its job has, under cgroup v2.

The machine of the tests may have the older control groups alone, and its Slurm enforces nothing. So
a kernel of its own (user-mode-linux, Debian's package) boots over the same files, with cgroup v2,
and runs a Slurm of one node. 26.05 names the folder of a job's control group by its SLUID.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, Run
from patience import scaled
from versions import root_of, why_no_root

pytestmark = pytest.mark.timeout(400)

SLURM_CONF = """
ClusterName=uml
SlurmctldHost=lab1(10.30.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/run/munge.socket
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=lab1 NodeAddr=10.30.0.1 CPUs=2 RealMemory=2500
PartitionName=low Nodes=lab1 Default=YES DefaultTime=60
"""
CGROUP_CONF = """
CgroupPlugin=cgroup/v2
IgnoreSystemd=yes
ConstrainRAMSpace=yes
ConstrainCores=no
"""
JOB = """#!/bin/bash
cat /proc/self/cgroup
cd {root}
exec {command}
"""
FAULT = '--resilience.faults=["hog rank 0 at step 12"]'
BOOT = (
    'mount --rbind /usr/local "$1/usr/local" && mount --rbind "$1/usr" /usr && shift && exec "$@"'
)


@pytest.mark.every_slurm
def test_a_rank_that_is_killed_for_want_of_memory_is_named_and_the_run_completes(
    tmp_path: Path, corpus: Path, pytestconfig: pytest.Config
) -> None:
    version = pytestconfig.getoption("--slurm")
    kernel = shutil.which("linux.uml")
    if not version or not kernel:
        pytest.skip("it needs --slurm=VERSION and user-mode-linux")
    if reason := why_no_root(version):
        pytest.skip(reason)
    run = Run(tmp_path / "tiny", corpus)
    supervise = [sys.executable, "-m", "kempner", "supervise", run.config, "--launcher", "srun"]
    command = shlex.join(map(str, [*supervise, FAULT]))
    (tmp_path / "job.sh").write_text(JOB.format(root=shlex.quote(str(ROOT)), command=command))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "slurm.conf").write_text(SLURM_CONF.format(folder=tmp_path))
    (tmp_path / "etc" / "cgroup.conf").write_text(CGROUP_CONF)
    shutil.copy(ROOT / "tests" / "slurm" / "uml_init.sh", tmp_path)
    shutil.copy(kernel, tmp_path / "linux")  # /usr is the other Debian's once it is started
    machine = [
        *(str(tmp_path / "linux"), "mem=3G", "quiet", "root=/dev/root", "rootfstype=hostfs"),
        *("rootflags=/", "rw", f"init={tmp_path}/uml_init.sh", "con=null", "con0=null,fd:1"),
    ]
    booted = subprocess.run(
        ["unshare", "--mount", "sh", "-c", BOOT, "sh", str(root_of(version)), *machine],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(200),
        check=False,
    )
    assert (tmp_path / "job.out").exists(), booted.stdout.decode(errors="replace")
    said = (tmp_path / "job.out").read_text()
    assert "memory 1000 (SLURM_MEM_PER_NODE) MiB" in said
    group = said.splitlines()[0].removeprefix("0::").partition("/step_batch")[0]
    assert f"out of memory: the kernel killed it (oom_kill of /sys/fs/cgroup{group})" in said
    assert "of 1.0 GiB were left" in said
    assert "completed 40 steps" in said
