"""What srun is told beside what kempner tells it, and where the ranks' Python is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kempner.cluster.network.interfaces import INFINIBAND, Interface
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.node_step import knows_option, without_binding
from kempner.config.sections import SuperviseSection
from kempner.config.site import SlurmSection
from kempner.supervisor.launchers import rank_runtime
from kempner.supervisor.launchers.agents import step
from kempner.supervisor.launchers.agents.step import SlurmAgents
from kempner.supervisor.launchers.rank_runtime import RankRuntime, reachable_addresses
from kempner.supervisor.launchers.run_nodes import RunNodes
from kempner.supervisor.slurm.setup import complaint

ALLOCATION = Allocation("7", ("node1", "node2"), 4, 8, 4, batch=True)


def of(**values: Any) -> RankRuntime:
    return RankRuntime.of(SlurmSection.model_validate(values))


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step, "reachable_addresses", lambda *_: ("127.0.0.1",))
    monkeypatch.chdir(tmp_path)


def test_an_image_is_named_to_srun_with_all_about_it(tmp_path: Path) -> None:
    container = {"image": "repo#img:1", "mounts": ["/a:/a", "/b:/c:ro"], "mount_home": False}
    runtime = of(container=container, srun_args=["--network=x"], python="python3")
    assert runtime.options == (
        "--container-image=repo#img:1",
        "--container-mounts=/a:/a,/b:/c:ro",
        "--no-container-mount-home",
        f"--container-workdir={tmp_path}",
        "--network=x",
    )
    agents = SlurmAgents(RunNodes(ALLOCATION, SuperviseSection()), SuperviseSection(), runtime)
    assert agents.srun("x", ALLOCATION.nodes, 4, runtime.options)[-5:] == list(runtime.options)
    assert runtime.has_other_python
    assert str(runtime) == "python3 in `--container-image=repo#img:1`"


def test_without_any_of_it_nothing_is_different() -> None:
    runtime = of()
    assert runtime == RankRuntime()
    assert not runtime.has_other_python
    assert runtime.delay == 0.0


@pytest.mark.parametrize(
    ("options", "binding", "rest"),
    [
        (["--cpu-bind=cores"], "--cpu-bind", []),
        (["--gpu-bind", "closest", "--exclusive"], "--gpu-bind", ["--exclusive"]),
        (["--chdir", "/x", "-mblock:cyclic"], "-mblock:cyclic", ["--chdir", "/x"]),
        (["-m", "cyclic", "--network=x"], "-m", ["--network=x"]),
        (["--network=single_node_vni", "--task-prolog=x"], "",
         ["--network=single_node_vni", "--task-prolog=x"]),
    ],
)  # fmt: skip
def test_options_that_bind_ranks_are_not_for_their_agents(
    options: list[str], binding: str, rest: list[str]
) -> None:
    assert of(srun_args=options).binding == binding
    assert without_binding(options) == rest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"srun_args": ["--nodes=2"]}, "which kempner sets itself; use slurm.hosts"),
        ({"srun_args": ["-n8"]}, '"-n8", which kempner sets itself; use slurm.procs'),
        ({"srun_args": ["--cpu-bind=cores", "--export=NONE"]}, "which kempner sets itself$"),
        ({"srun_args": ["cores"]}, "which is no option"),
        ({"container": {"image": "a", "prefix": ["b"]}}, "two kinds of containers"),
        ({"container": {"mounts": ["/a"]}}, "mounts has no effect without image"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SlurmSection.model_validate(values)
    (error,) = refused.value.errors()
    assert re.search(said, error["msg"])


@pytest.mark.parametrize(
    ("help_text", "known"),
    [
        ("Options provided by plugins:\n      --container-image=[USER@][REGISTRY#]IMAGE\n", True),
        ("  --container Path to OCI container bundle\n  --container-id=id\n", False),
        ("      --container-image-save=PATH\n", False),
        ("", False),
    ],
)
def test_whether_srun_knows_pyxis(help_text: str, known: bool) -> None:
    assert knows_option(help_text, "--container-image") is known


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'kempner'\n"
            "srun: error: node1: task 0: Exited with exit code 1\n",
            "ModuleNotFoundError: No module named 'kempner'",
        ),
        (
            "slurmstepd: error: execve(): /x/python: No such file or directory\n"
            "srun: error: node1: task 0: Exited with exit code 2\n",
            "slurmstepd: error: execve(): /x/python: No such file or directory",
        ),
        ("srun: error: Unable to create step\n", "srun: error: Unable to create step"),
        ("", "it says nothing"),
    ],
)
def test_which_line_says_what_is_wrong(text: str, line: str) -> None:
    assert complaint(text) == line


LOOPBACK = Interface("lo", 772, True, "127.0.0.1/8")
EM4 = Interface("em4", 1, True, "10.20.0.11/24")
IB0 = Interface("ib0", INFINIBAND, True, "10.10.0.11/24")


@pytest.mark.parametrize(
    ("interfaces", "route", "control", "interface", "addresses"),
    [
        ([EM4, IB0], "10.20.0.11", None, None, ("10.10.0.11", "10.20.0.11")),
        ([EM4, IB0], "10.10.0.11", None, None, ("10.10.0.11",)),  # names mean the fabric
        ([EM4, IB0], "", None, None, ("10.10.0.11",)),
        ([EM4], "10.20.0.11", None, None, ("10.20.0.11",)),
        ([EM4, IB0], "10.20.0.11", "em4", None, ("10.20.0.11",)),
        ([EM4, IB0], "10.20.0.11", None, "em4", ("10.20.0.11",)),
        ([EM4, IB0], "10.20.0.11", None, "ib7", ("10.20.0.11",)),  # of the ranks' nodes
    ],
)
def test_the_supervisor_is_reached_over_the_fabric_and_over_what_names_mean(
    monkeypatch: pytest.MonkeyPatch,
    interfaces: list[Interface],
    route: str,
    control: str | None,
    interface: str | None,
    addresses: tuple[str, ...],
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rank_runtime, "read_interfaces", lambda: [LOOPBACK, *interfaces])
    monkeypatch.setattr(rank_runtime, "route_address", lambda host: route)
    assert reachable_addresses(["node1", "node2"], control, interface) == addresses
