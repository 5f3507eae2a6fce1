"""What sites want: srun options, containers, another Python, hooks, suspects that runs share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness import Run
from submitting import LONG, Project, assert_like

pytestmark = pytest.mark.timeout(400)

INSIDE = "/mnt/venv/bin/python"
"""Where the ranks' Python is, in the container only."""

CONTAINER = f"""#!/bin/bash
# apptainer, as far as it matters here: a mount namespace of its own, a parent that stays, and what
# is inside is not there outside.
[ "$1 $2" = "exec image.sif" ] || exit 99
shift 2
exec unshare --mount bash -c '
    mount -t tmpfs inside /mnt && mkdir /mnt/venv || exit 98
    mount --bind "{sys.prefix}" /mnt/venv || exit 98
    "$@" &
    wait $!
' in-container "$@"
"""

PROLOG = """#!/bin/bash
echo export FROM_SRUN_ARGS=yes
"""

EXPORTED = {"NCCL_BUFFSIZE": "4194304", "FI_PROVIDER": "tcp", "TORCH_DIST_INIT_BARRIER": "1"}

CHECK = 'echo $KEMPNER_EVENT >> {told}/check-$KEMPNER_NODE; [ "$KEMPNER_NODE" != node2 ]'
SUSPECT = 'echo "$KEMPNER_NODE: $KEMPNER_REASON" >> {told}/suspect; exit 3'
COMPLETED = 'echo "$KEMPNER_RUN_NAME $KEMPNER_JOB_ID" >> {told}/completed'


def settings(**values: object) -> list[str]:
    """Overrides, with lists as TOML has them."""
    return [f"--{key.replace('__', '.')}={json.dumps(v)}" for key, v in values.items()]


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_site_has_its_container_its_srun_options_and_its_hooks(
    project: Project, undisturbed: Run
) -> None:
    """One of three nodes fails the site's check; the ranks run on the others, in a container, are
    stopped and come back; another run of the group hears of the node."""
    told, group = project.folder / "told", project.folder / "group"
    told.mkdir()
    container = script(project.folder / "fake-apptainer", CONTAINER)
    prolog = script(project.folder / "prolog.sh", PROLOG)
    job = project.train(
        *LONG,
        *settings(
            slurm__container__prefix=[container, "exec", "image.sif"],
            slurm__python=INSIDE,
            slurm__srun_args=[f"--task-prolog={prolog}"],
            slurm__setup=["bash", "-c", f"test -x {INSIDE} && echo once >> {told}/setup"],
            hooks__before_start=CHECK.format(told=told),
            hooks__node_suspect=SUSPECT.format(told=told),
            hooks__completed=COMPLETED.format(told=told),
            resilience__suspects_dir=str(group),
            supervise__spare_nodes=1,
        ),
        nodes=3,
        options=("--nodelist=node[1-3]",),
        **EXPORTED,
    )
    project.reach(job, 5)
    for node in ("node1", "node3"):
        (rank,) = project.ranks(node)
        process = Path(f"/proc/{rank}")
        assert " /mnt/venv " in (process / "mountinfo").read_text()
        variables = (process / "environ").read_bytes().decode().split("\0")
        assert "FROM_SRUN_ARGS=yes" in variables
        assert {f"{name}={value}" for name, value in EXPORTED.items()} <= set(variables)
    assert not project.ranks("node2")
    project.warn(job)
    project.wait_until(job, lambda: project.events("requeued"), "the requeue")
    project.end(job)
    assert_like(project.run, undisturbed)
    (stopped,) = project.events("stopped")
    assert stopped["lost_steps"] == 0
    assert (told / "setup").read_text() == "once\n" * 2  # for each launch of the job
    assert (told / "check-node1").read_text() == "before_start\n" * 2
    why = "hooks.before_start failed there: exit status 1"
    assert set((told / "suspect").read_text().splitlines()) == {f"node2: {why}"}
    assert "hooks.node_suspect failed: exit status 3" in project.log(job)
    assert (told / "completed").read_text() == f"run {job}\n"
    assert json.loads((group / "node2.json").read_text())["reason"] == why

    other = project.train(
        "--run.name=other",
        *settings(resilience__suspects_dir=str(group), supervise__spare_nodes=1),
        nodes=3,
        options=("--nodelist=node[1-3]",),
    )
    project.end(other)
    assert f"node2 is suspect, and left out: {why} (seen by run run)" in project.log(other)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"slurm__python": "/usr/bin/python3"},
            "kempner cannot be imported by the ranks' Python, /usr/bin/python3: "
            "ModuleNotFoundError: No module named",
        ),
        (
            {"slurm__container__image": "nvcr.io#nvidia/pytorch:25.09"},
            "slurm.container.image needs srun's plugin pyxis",
        ),
        ({"slurm__setup": ["sh", "-c", "echo no lock file; exit 4"]}, "slurm.setup ended with 4"),
    ],
)
def test_what_a_site_does_not_have_is_said_before_any_rank_starts(
    project: Project, asked: dict[str, object], said: str
) -> None:
    job = project.train(*settings(**asked), nodes=1)
    project.end(job, "FAILED")
    assert said in project.log(job)
    assert "Traceback" not in project.log(job)
    assert project.run.attempt() == 0
