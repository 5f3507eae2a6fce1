"""However a rank is started, its node's network is decided by the same function."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from patience import scaled

from kempner.cluster.network.interfaces import Interface, InterfaceChoice
from kempner.cluster.world import World, network_of_rank
from kempner.config.site import DistributedSection
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.link.auth import Secret
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.rank_output import ChildRank
from kempner.supervisor.policy.outcome import RankExit
from kempner.training.groups import process_groups

ODD = Interface("odd7", 1, True, "10.9.8.7/24")

PATCH = f"""
import kempner.supervisor.launchers.rank_network as network
from kempner.cluster.network.interfaces import Interface, InterfaceChoice
network.network_of_rank = lambda *_: InterfaceChoice({ODD!r}, "by the one function")
"""
"""Imported as any Python begins: the function answers with an interface that is none."""

TELLS = "import os\nprint({n: os.environ.get(n) for n in os.environ if n.endswith('_IFNAME')})\n"


def environment(tmp_path: Path) -> dict[str, str]:
    """Of a rank of several nodes."""
    terms = LaunchTerms(tmp_path / "run", 1.0, 1.0, 1.0)
    launch = Launch(Attempt(1, "n"), Secret("x"), terms=terms)
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    (tmp_path / "tells.py").write_text(TELLS)
    known = {k: v for k, v in os.environ.items() if not k.endswith("_IFNAME")}
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    return {
        **known,
        **launch.environment(),
        **place,
        "KEMPNER_OF_AGENT": "1",
        "PYTHONPATH": path,
    }


@pytest.mark.parametrize("modules", [(), ("json",)], ids=["a process", "forked"])
def test_children_of_a_supervisor_or_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...]
) -> None:
    environ, ends = environment(tmp_path), list[RankExit]()
    monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])
    program = Program.of_user([sys.executable, str(tmp_path / "tells.py")], modules)
    children = Children()
    children.prepare(program)
    children.start(ChildRank(0, environ, tmp_path / "out"), program, ends.append)
    assert children.forget(scaled(30))
    children.close()
    assert [end.status for end in ends] == [0], (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    assert "'GLOO_SOCKET_IFNAME': 'odd7'" in said
    assert "'NCCL_SOCKET_IFNAME': '=odd7'" in said


@pytest.mark.parametrize("modules", [(), ("json",)], ids=["a process", "forked"])
def test_tasks_of_srun_and_workers_of_torchrun(tmp_path: Path, modules: tuple[str, ...]) -> None:
    """They run the cold command: `srun COMMAND`, `torchrun --no-python COMMAND`."""
    program = Program.of_user([sys.executable, str(tmp_path / "tells.py")], modules)
    done = subprocess.run(
        program.cold, env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert "'GLOO_SOCKET_IFNAME': 'odd7'" in done.stdout


def test_training_of_ours_and_groups_of_a_program_without_a_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decide(environ: Mapping[str, str], *_: object) -> InterfaceChoice:
        return InterfaceChoice(ODD, "by the one function")

    monkeypatch.setattr(process_groups, "network_of_rank", decide)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "", prepend=None)
        monkeypatch.delenv(name)
    process_groups._bind(World(0, 4, 0, 2, "torchrun"), DistributedSection(), "")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "odd7"
    assert network_of_rank({}, World(0, 2, 0, 2, "srun"), None, "").interface is not None
