"""How the doctor learns what it judges: from scripts, nvidia-smi, a write test, a dry run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from sick_site import PARTITION, mounted, smi

from kempner.cluster.network.interfaces import InterfaceNetwork, read_interfaces
from kempner.cluster.slurm.job import node_fields
from kempner.insight.doctor.facts.nodes import listening
from kempner.insight.doctor.facts.slurm import (
    EarlySignal,
    JobPlan,
    Partition,
    RequestedNodes,
    parse_limit,
    parse_plan,
    read_partition,
    read_plan,
    there_is_slurm,
)
from kempner.probe import details as write_module
from kempner.probe import node as probe
from kempner.probe.details import look_at_software, read_survey, survey_gpus, write_test
from kempner.probe.node import DetailQuestion, ProbeQuestion, examine_network


def test_the_projects_own_script_is_understood() -> None:
    plan = read_plan(ROOT / "scripts/slurm/multinode.sh")
    assert plan == JobPlan(
        source=str(ROOT / "scripts/slurm/multinode.sh"),
        nodes=RequestedNodes(2, 4, 4),
        limit=86400.0,
        warning=EarlySignal("TERM", 120.0, to_script=True),
        requeue=True,
    )


@pytest.mark.parametrize(
    ("line", "more", "expected"),
    [
        ("-N 3 -n 12 -t 30 -p a,b", [], {"nodes": RequestedNodes(3, 4), "limit": 1800.0}),
        ("--nodes=2-4 --gres=gpu:h100:8", [], {"nodes": RequestedNodes(2, None, 8)}),
        ("--gres=lustre:1", [], {"nodes": RequestedNodes()}),
        ("--time=10", ["--time", "20"], {"limit": 1200.0}),
        ("--sig USR1", [], {"warning": EarlySignal("USR1", 60.0, to_script=False)}),
        ("--signal=BR:sigterm@300", [], {"warning": EarlySignal("TERM", 300.0, True)}),
        ("--requeue", ["--no-requeue"], {"requeue": False}),
        ("--comment='a b' --exclusive  # --time=1", [], {"limit": None, "requeue": None}),
        ("--partition=gpu", [], {"partition": "gpu"}),
    ],
)
def test_options_of_a_script(line: str, more: list[str], expected: dict[str, Any]) -> None:
    plan = parse_plan(f"#!/bin/bash\n#SBATCH {line}\necho\n#SBATCH --nodes=99\n", "job.sh", more)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize("line", ["--time=soon", "--signal=@", "--nodes=many"])
def test_a_script_that_is_wrong_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"^job\.sh cannot be understood: "):
        parse_plan(f"#SBATCH {line}\n", "job.sh")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),
        ("1:30", 90.0),
        ("1:00:05", 3605.0),
        ("2-1", 176_400.0),
        ("2-01:30", 178_200.0),
        ("2-01:30:05", 178_205.0),
        ("UNLIMITED", None),
    ],
)
def test_forms_of_a_time_limit(text: str, seconds: float | None) -> None:
    assert parse_limit(text) == seconds


def test_a_partition_as_scontrol_shows_it() -> None:
    found = read_partition(node_fields(PARTITION))
    assert found == Partition("gpu", grace=60.0, longest=172_800.0, up=True)


def test_gpus_of_old_and_new_drivers() -> None:
    survey = read_survey(smi({}, {"dram_uncorrectable": "N/A", "pid": "7"}))
    assert (survey.driver, [gpu.ecc for gpu in survey.gpus]) == ("550.54.15", [0, 0])
    assert [gpu.processes for gpu in survey.gpus] == [(), (7,)]
    assert survey.gpus[0].memory_total == 81559 << 20
    (old,) = read_survey(
        """<nvidia_smi_log><gpu><product_name>Tesla V100</product_name>
        <clocks_throttle_reasons>
        <clocks_throttle_reason_gpu_idle>Active</clocks_throttle_reason_gpu_idle>
        <clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
        </clocks_throttle_reasons>
        <ecc_errors><volatile><single_bit><total>9</total></single_bit>
        <double_bit><device_memory>1</device_memory><total>1</total></double_bit></volatile>
        </ecc_errors>
        <retired_pages><pending_retirement>Yes</pending_retirement></retired_pages>
        </gpu></nvidia_smi_log>"""
    ).gpus
    assert (old.ecc, old.remap, old.throttles) == (1, "pending", ("hw slowdown",))


def test_gpus_that_are_hidden_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smi.xml").write_text(smi({}, {"remapped_row_failure": "Yes"}))
    command = tmp_path / "nvidia-smi"
    command.write_text(f'#!/bin/sh\ncat "{tmp_path}/smi.xml"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [gpu.index for gpu in survey_gpus({"CUDA_VISIBLE_DEVICES": "0"}).gpus] == [0]
    assert [gpu.index for gpu in survey_gpus({"CUDA_VISIBLE_DEVICES": "GPU-ab"}).gpus] == [0, 1]
    assert [gpu.index for gpu in survey_gpus({}).gpus] == [0, 1]
    command.chmod(0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert survey_gpus({}).trouble == "nvidia-smi cannot be started: Permission denied"


def test_a_folder_on_the_path_that_cannot_be_used_is_no_fault_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("PATH", f"{tmp_path / 'loop'}")
    assert survey_gpus({}).trouble == ""


def test_a_write_test_is_short_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_module, "LARGEST", 8 * 2**20)
    found = write_test(tmp_path, "x")
    assert found.written == 8 * 2**20
    assert found.rate is not None
    assert list(tmp_path.iterdir()) == []

    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(write_module, "LARGEST", 2**40)
    assert write_test(tmp_path, "x").written <= 2 * 4 * 2**20


def test_a_write_test_takes_little_of_a_small_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        found = write_test(disk, "x")
    assert 0 < found.written <= 2**20 // 10
    assert found.trouble == ""


def test_a_write_test_on_a_full_disk_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        (disk / "ballast").write_bytes(bytes(64 * 1024))
        found = write_test(disk, "x")
    assert (found.rate, found.trouble) == (None, "No space left on device")


def test_a_node_asks_for_the_time_through_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        i for i in read_interfaces() if i.usable and i.network is not InterfaceNetwork.LOOPBACK
    ]
    if not found:
        pytest.skip("this machine has no network")
    with listening() as (addresses, port):
        meeting = DetailQuestion(meet_at=addresses, port=port)
        question = ProbeQuestion("", (), found[0].name, False, details=meeting)
        ahead = examine_network(question, {})[1].clock_ahead
        assert ahead is not None
        assert abs(ahead) < 1.0
        clock = time.time
        monkeypatch.setattr(probe.time, "time", lambda: clock() + 30.0 * asking())
        ahead = examine_network(question, {})[1].clock_ahead
        assert ahead is not None
        assert 29.0 < ahead < 31.0
    assert "cannot be reached from" in examine_network(question, {})[1].unreachable


def asking() -> bool:
    """Whether this is the thread of the node, and not of the doctor."""
    return threading.current_thread() is threading.main_thread()


def test_the_dry_run_imports_torch_and_a_model_of_ones_own() -> None:
    found = look_at_software(["kempner.config.loading:load"])
    assert (found.trouble, found.devices) == ("", 0)
    assert found.torch.startswith("2.")
    assert found.kempner


@pytest.mark.parametrize(
    ("said", "there"),
    [
        ("scontrol: fatal: Could not establish a configuration source", False),
        ("slurm_load_ctl_conf error: Unable to contact slurm controller", True),
    ],
)
def test_a_laptop_with_the_package_alone_has_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, there: bool
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("kempner.insight.doctor.facts.slurm._CONFIGURATION", tmp_path / "none")
    assert there_is_slurm({}) is there
    assert there_is_slurm({"SLURM_CONF": "/somewhere"})
