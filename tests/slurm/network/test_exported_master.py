"""MASTER_ADDR and MASTER_PORT that the user exports are obeyed, by every launcher."""

from __future__ import annotations

import re

import pytest
from harness import PYTHON
from submitting import Project

pytestmark = pytest.mark.timeout(300)

PORT = "29611"
BY_AGENTS, BY_SRUN = (), ("--supervise.fork=false",)
COMMAND = f"""#!/bin/bash
#SBATCH --output=logs/%j_told.out
exec {PYTHON} -m kempner supervise --launcher srun --run.name=told "$@" -- \\
    bash -c 'echo told $RANK $MASTER_ADDR $MASTER_PORT
    echo network $RANK $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $NCCL_DEBUG $NCCL_IB_GID_INDEX'
"""


def exported(project: Project) -> dict[str, str]:
    """By its fast network, which neither Slurm's name of the node nor its host name mean."""
    return {"MASTER_ADDR": project.cluster.address("node1", "ib0"), "MASTER_PORT": PORT}


@pytest.mark.parametrize(
    ("script", "options"),
    [("multinode.sh", BY_AGENTS), ("multinode.sh", BY_SRUN), ("torchrun.sh", ())],
)
def test_ranks_meet_where_the_user_says_and_the_log_begins_with_it(
    project: Project, script: str, options: tuple[str, ...]
) -> None:
    tasks = ("--ntasks-per-node=2",) if script == "torchrun.sh" else ()
    said, config = exported(project), str(project.run.config.relative_to(project.folder))
    job = project.submit(
        *(script, config, "--train.max_steps=3", "--run.name=hf_abcdefghijklmnopqrstuv", *options),
        options=("--nodes=2", "--nodelist=node[1-2]", *tasks),
        **said,
    )
    project.end(job)
    log, place = project.log(job), f"{said['MASTER_ADDR']}:{PORT}"
    assert f"master: {place} (MASTER_ADDR, MASTER_PORT of the environment)\n" in log
    assert "network: ib0 (10.10.0.11) on node1\n" in log
    assert f"configuration: {config} --train.max_steps=3 '--run.name=***'" in log
    ignored = "--ntasks-per-node=2 is ignored: one torchrun per node starts 1 ranks there"
    assert (ignored in log) == (script == "torchrun.sh")
    if script != "torchrun.sh":  # torchrun tells its workers its host's name, and the port
        assert f"the ranks meet at {place} over ib0\n" in log
    assert re.search(r"completed 3 steps: loss \d\.\d{4}$", log, re.M)


@pytest.mark.parametrize("options", [BY_AGENTS, BY_SRUN])
def test_a_command_is_told_the_network_and_what_the_user_says_of_it(
    project: Project, options: tuple[str, ...]
) -> None:
    (project.folder / "told.sh").write_text(COMMAND)
    resources = ("--nodelist=node[1-2]", "--ntasks-per-node=1", "--cpus-per-task=2")

    def told(**environ: str) -> list[str]:
        job = project.cluster.sbatch(*resources, "told.sh", *options, cwd=project.folder, **environ)
        project.end(job)
        lines = project.log(job).splitlines()
        return sorted(x for x in lines if x.startswith(("told ", "network ")) or "ignored" in x)

    options = (*options, "--distributed.nccl.debug=WARN", "--distributed.nccl.ib_gid_index=3")
    place = f"node1-ib {PORT}"
    said = {"MASTER_ADDR": "node1-ib", "GLOO_SOCKET_IFNAME": "ib7,ib0", "NCCL_DEBUG": "INFO"}
    assert told(**exported(project) | said) == [
        "network 0 ib7,ib0 =ib0 INFO 3",
        "network 1 ib7,ib0 =ib0 INFO 3",
        f"told 0 {place}",
        f"told 1 {place}",
    ]
    # Of a login shell: no rank of another node is there.
    ignored, *ranks = told(MASTER_ADDR="localhost", MASTER_PORT=PORT)
    assert "MASTER_ADDR=localhost is ignored: the ranks are on 2 nodes" in ignored
    found = f"{project.cluster.address('node1', 'ib0')} {PORT}"
    network = ["network 0 ib0 =ib0 WARN 3", "network 1 ib0 =ib0 WARN 3"]
    assert ranks == [*network, f"told 0 {found}", f"told 1 {found}"]
