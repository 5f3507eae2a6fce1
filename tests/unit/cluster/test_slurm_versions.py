"""What `scontrol show job -d -o` says from Slurm 22.05 to 26.05.

The line of 22.05 was recorded on the cluster of tests/slurm. Those of later versions follow the
formats in their sources: `src/api/job_info.c` of slurm-23-02-8-1, slurm-23-11-11-1 and
slurm-24-05-8-1, `src/scontrol/info_job.c` of slurm-24-11-7-1, slurm-25-05-8-1, slurm-25-11-7-1 and
slurm-26-05-3-1. What changed, by CHANGELOG/slurm-*.md and these sources:

- 23.02: ReqTRES and AllocTRES instead of TRES; SLURM_JOB_END_TIME; --tres-per-task.
- 23.11: `gres/gpu` instead of `gres:gpu`; "Requesting --cpus-per-task will now set
  SLURM_TRES_PER_TASK=cpu:#", and with it a TresPerTask at the end of the line.
- 24.05: `cpu=8` instead of `cpu:8`; no Power.
- 24.11: "In existing allocations SLURM_GPUS_PER_NODE environment variable will be ignored by srun
  if --gpus is specified": kempner passes --gpus-per-node itself, and hands no SLURM_GPUS on.
  OOMKillStep.
- 25.05: LicensesAlloc, SegmentSize.
- 25.11: SLUID between JobName and UserId; SubmitLine, in which the user may have written anything;
  "Remove the trailing space after AdminComment, SystemComment, Comment, and Extra".
- 26.05: Exclusive, ContainerType.
"""

from __future__ import annotations

import pytest

from kempner.cluster.slurm.job import (
    NodeShare,
    gpu_types,
    gpus_by_node,
    job_fields,
    node_shares,
    parse_job,
)
from kempner.cluster.slurm.resources import detect

HEAD = (
    "JobId=7 JobName=a b{sluid} UserId=u(1) GroupId=u(1) MCS_label=N/A Priority=1 Nice=0 Account=a "
    "QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:00 TimeLimit=01:00:00 TimeMin=N/A "
    "SubmitTime=2026-11-23T10:58:35 EligibleTime=2026-11-23T10:58:35 AccrueTime=Unknown StartTime="
    "2026-11-23T10:58:38 EndTime=2026-11-23T11:58:38 Deadline=N/A PreemptEligibleTime="
    "2026-11-23T10:58:38 PreemptTime=None SuspendTime=None SecsPreSuspend=0 LastSchedEval="
    "2026-11-23T10:58:38 Scheduler=Main Partition=low AllocNode:Sid=login1:0 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=node[1-3] BatchHost=node1{stepmgr} NumNodes=3 NumCPUs=20 NumTasks="
    "3 CPUs/Task=1 ReqB:S:C:T=0:0:*:* {tres} Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* "
    "JOB_GRES=gpu:10   Nodes=node[1-2] CPU_IDs=0-7 Mem=0 GRES={four}   Nodes=node3 CPU_IDs=0-1,4-5 "
    "Mem=0 GRES={two} MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) "
    "DelayBoot=00:00:00 "
)
USERS = "WorkDir=/w StdErr=/w/7.out StdIn=/dev/null StdOut=/w/7.out "
TRES = "ReqTRES=cpu=20,node=3,billing=20,gres/gpu=10 AllocTRES=cpu=20,node=3,billing=20,gres/gpu=10"
PLAIN = {"four": "gpu:4(IDX:0-3)", "two": "gpu:2(IDX:0-1)", "sluid": "", "stepmgr": ""}
H100 = {**PLAIN, "four": "gpu:h100:4(IDX:0-3)", "two": "gpu:h100:2(IDX:0-1)"}
MIG = {**PLAIN, "four": "gpu:1g.10gb:4(IDX:0-3)", "two": "gpu:1g.10gb:2(IDX:0,6)"}
OLD = "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/w/b.sh --a=1 "
ALLOC = "OverSubscribe=OK Contiguous=0 Licenses=(null) LicensesAlloc=(null) Network=(null) "
LINE = "SubmitLine=sbatch --comment=x TresPerNode=gres/gpu:9 GRES=gpu:9 b.sh "

VERSIONS = {
    "22.05": (
        HEAD.format(tres="TRES=cpu=20,node=3,gres/gpu=10", **PLAIN) + OLD + USERS + "Power= "
        "TresPerJob=gres:gpu:10 ",
        {"TresPerJob": "gres:gpu:10"},
    ),
    "23.02": (
        HEAD.format(tres=TRES, **H100) + OLD + "Comment=TresPerNode=gres:gpu:9 here  " + USERS
        + "Power= TresPerNode=gres:gpu:h100:4 MailUser=u MailType=END,FAIL ",
        {"TresPerNode": "gres:gpu:h100:4"},
    ),
    "23.11": (
        HEAD.format(tres=TRES, **PLAIN) + OLD + USERS + "Power= TresPerNode=gres/gpu:4 "
        "TresPerTask=cpu:8 ",
        {"TresPerNode": "gres/gpu:4", "TresPerTask": "cpu:8"},
    ),
    "24.05": (
        HEAD.format(tres=TRES, **{**PLAIN, "stepmgr": " StepMgrEnabled=Yes"}) + OLD + USERS
        + "CpusPerTres=gres/gpu:2 TresBind=gres/gpu:per_task:1 "
        "TresPerTask=cpu=2,gres/gpu=1 ",
        {"TresPerTask": "cpu=2,gres/gpu=1"},
    ),
    "24.11": (
        HEAD.format(tres=TRES, **MIG) + OLD + USERS + "OOMKillStep=0 "
        "TresPerNode=gres/gpu:1g.10gb:4 TresPerTask=cpu=8 "
        "MailUser=u@h MailType=INVALID_DEPEND,BEGIN,END NtasksPerTRES=1 ",
        {"TresPerNode": "gres/gpu:1g.10gb:4", "NtasksPerTRES": "1"},
    ),
    "25.05": (
        HEAD.format(tres=TRES, **PLAIN) + ALLOC + "Command=/w/b.sh " + USERS + "SegmentSize=2 "
        "TresPerJob=gres/gpu:10 ResvPorts=20000-20003 ",
        {"TresPerJob": "gres/gpu:10"},
    ),
    "25.11": (
        HEAD.format(tres=TRES, **{**PLAIN, "sluid": " SLUID=s1"}) + ALLOC + "Command=/w/b.sh "
        + LINE + USERS + "TresPerNode=gres/gpu:4 TresPerTask=cpu=8",
        {"TresPerNode": "gres/gpu:4"},
    ),
    "26.05": (
        HEAD.format(tres=TRES, **{**H100, "sluid": " SLUID=s1"})
        + ALLOC.replace("Contiguous", "Exclusive=NO Contiguous") + "Command=/w/b.sh " + LINE + USERS
        + "TresPerNode=gres/gpu:h100:4 ContainerType=oci Container=/c ContainerID=i ",
        {"TresPerNode": "gres/gpu:h100:4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_is_read_whatever_the_version(version: str) -> None:
    text, at_the_end = VERSIONS[version]
    fields = job_fields(text + "\n")
    assert {name: fields.get(name) for name in at_the_end} == at_the_end
    assert ("TresPerNode" in fields) == ("TresPerNode" in at_the_end)  # not the user's own words
    state = parse_job(fields)
    assert (state.id, state.state, state.restarts, state.nodes.held) == (
        "7", "RUNNING", 2, "node[1-3]",
    )  # fmt: skip
    assert state.running
    assert state.batch


@pytest.mark.parametrize("version", VERSIONS)
def test_what_it_has_of_each_node_is_read_whatever_the_version(version: str) -> None:
    shares = node_shares(VERSIONS[version][0])
    full, less = NodeShare(cpus=8, gpus=4), NodeShare(cpus=4, gpus=2)
    assert shares == {"node1": full, "node2": full, "node3": less}
    assert gpus_by_node(shares, ["node1", "node3"]) == {"node1": 4, "node3": 2}
    assert gpus_by_node(shares, ["node1", "node4"]) == {}


@pytest.mark.parametrize("version", ["23.02", "23.11", "24.11", "25.11", "26.05"])
def test_an_allocation_of_somebody_elses_tells_its_gpus(version: str) -> None:
    """`interactive.sh` has no variables of the job: a rank per node was all that it started where
    something stood after TresPerNode."""
    assert detect({}, job=job_fields(VERSIONS[version][0])).gpus.value == 4


def test_a_part_of_a_gpu_is_a_type_of_its_own() -> None:
    assert gpu_types("gres/gpu:1g.10gb:7") == {"1g.10gb"}
    assert gpu_types("gpu:nvidia_a100_1g.5gb:7(S:0),gpu:3g.20gb:1") == {
        "nvidia_a100_1g.5gb", "3g.20gb",
    }  # fmt: skip
    assert gpu_types("gres:gpu:4") == set()


def test_a_job_without_gpus_or_of_unknown_words_has_none() -> None:
    text = "JobId=1   Nodes=n1 CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1 Command=/x "
    text += "Nodes=n2 CPU_IDs=0-9 Mem=0 GRES=gpu:4 "
    assert node_shares(text) == {"n1": NodeShare(1, 0)}
    assert node_shares("JobId=1 Nodes=elsewhere") == {}
