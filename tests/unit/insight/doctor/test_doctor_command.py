"""`kempner doctor` as a person meets it: its table, its exit code, what it leaves alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import pytest
from harness import KEMPNER, ROOT, wait_until
from patience import scaled
from rich.console import Console
from sick_site import Site

from kempner.cli.entry import main
from kempner.config.loading import load
from kempner.insight.doctor.checks.fit import PlannedWorld
from kempner.insight.doctor.examine import Examination, Supervisor, examine
from kempner.insight.doctor.finding import (
    CheckOutcome,
    Finding,
    Level,
    fail,
    lines,
    passed,
    per_node,
    show,
)
from kempner.probe import node
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory

FINDINGS = [
    Finding("mesh", Level.PASS, "8 ranks"),
    Finding("clock", Level.WARN, "it is 3 s ahead", ("node2",)),
    Finding("open files", Level.FAIL, "200", tuple(f"node{n}" for n in range(3, 9))),
]


def test_the_table_names_the_nodes() -> None:
    nodes = [f"node{n}" for n in range(1, 9)]
    assert [*lines(FINDINGS, nodes)] == [
        "pass    mesh             8 ranks",
        "warn    clock            node2: it is 3 s ahead",
        "fail    open files       node3, node4, node5, node6 and 2 more: 200",
        "1 failed, 1 warned, 1 passed",
    ]
    assert next(lines([FINDINGS[1]], ["node2"])) == "warn    clock            it is 3 s ahead"


def test_a_check_is_told_as_soon_as_it_is_known(site: Site) -> None:
    """Before the nodes are asked, which takes as long as the import of torch."""
    looked: list[str] = []

    @contextmanager
    def looking(what: str) -> Iterator[None]:
        looked.append(what)
        yield

    config = load(Path("c.toml"), [])
    patient = Examination(
        config, RunDirectory(Path("runs/c")), PlannedWorld(1, 1, None, "one process")
    )
    supervisor = Supervisor(lambda: None, lambda save: 2 * save)
    found = examine(patient, supervisor, looking=looking)
    known = [each.check for each in islice(found, 7)]
    assert known == ["configuration", "run", "mesh", "data", "tokenizer", "held-out data", "start"]
    assert not any("torch" in what for what in looked)
    assert next(found).check == "ranks and GPUs"
    assert any("torch" in what for what in looked)


def test_nodes_that_are_well_share_a_line() -> None:
    free = {"node1": 7, "node2": 1, "node3": 8, "node4": 1}

    def judge(node: str) -> CheckOutcome:
        return passed(f"{free[node]} GB free") if free[node] > 2 else fail("hardly any")

    assert per_node("memory", list(free), judge, str) == [
        Finding("memory", Level.PASS, "7 GB free", ("node1", "node3")),
        Finding("memory", Level.FAIL, "hardly any", ("node2", "node4")),
    ]


def test_the_table_at_a_terminal_is_as_wide_as_that(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+") as file:
        nodes = [f"node{n}" for n in range(1, 9)]
        show(FINDINGS, nodes, Console(file=file, width=40, force_terminal=True))
        file.seek(0)
        told = re.sub(r"\x1b\[[\d;]*m", "", file.read()).splitlines()
    assert max(map(len, told)) <= 40
    assert "node2: it is 3" in " ".join(told)
    assert told[-1] == "1 failed, 1 warned, 1 passed"


def test_one_line_for_each_check(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "c.toml", "--data.dataset_path=typo"])
    told = capsys.readouterr().out.splitlines()
    assert ended.value.code == 2
    assert any(re.match(r"fail {4}data +data\.dataset_path=typo: typo is not", t) for t in told)
    assert told[-1].startswith("1 failed, ")


def test_a_run_that_goes_on_is_not_disturbed(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(Path("runs/c"))
    begin_attempt(run)
    lease = Lease.acquire(run, 45.0)
    monkeypatch.setattr(node, "write_test", lambda *given: pytest.fail("it wrote"))
    try:
        report = site.doctor(capsys)
    finally:
        lease.release()
    assert report.bad() == []
    said = {each["check"]: each["sentence"] for each in report.told["findings"]}
    assert said["run"] == "runs/c is running: nothing that would slow it down is done"
    assert said["save time"] == "the write test was left out"


def test_a_model_of_ones_own_is_as_large_as_its_last_checkpoint(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.toml").write_text('[model]\nfactory = "mine:build"\n[data]\ndataset_path="tokens"\n')
    Path("mine.py").write_text("def build(options, vocab_size): ...")
    own = ("--train.seq_len=32",)
    said = {f["check"]: f["sentence"] for f in site.doctor(capsys, *own).told["findings"]}
    assert "shows only after the first one" in said["space"]
    step = Path("runs/c/checkpoints/step-00000010")
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (step / "__0_0.distcp").write_bytes(bytes(10**6))
    said = {f["check"]: f["sentence"] for f in site.doctor(capsys, *own).told["findings"]}
    assert "a checkpoint of 1.0 MB takes about" in said["save time"]


@pytest.mark.parametrize("script", ["multinode.sh", "singlenode.sh", "torchrun.sh"])
def test_the_scripts_of_the_project_are_well(
    site: Site, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    report = site.doctor(capsys, "--script", str(ROOT / "scripts/slurm" / script))
    assert report.bad() == []
    nodes = 1 if script == "singlenode.sh" else 2
    said = {f["check"]: f["sentence"] for f in report.told["findings"]}
    assert said["mesh"].startswith(f"{4 * nodes} ranks")


def test_ended_early_it_leaves_nothing(site: Site) -> None:
    slow = site.folder / "slow"
    slow.mkdir()
    (slow / "torch.py").write_text("import time; time.sleep(600)")
    doctor = subprocess.Popen(
        [*KEMPNER, "doctor", "c.toml"],
        env={**os.environ, "PYTHONPATH": f"{slow}:{ROOT}"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(site.folder.glob(".kempner-doctor-*/asked")), "it writes")
        doctor.terminate()
        assert doctor.wait(scaled(60)) == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(doctor.pid, signal.SIGKILL)
    assert list(site.folder.glob(".kempner-doctor-*")) == []


def test_what_a_login_node_lacks_is_no_fault_of_the_nodes(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.gpus({"remapped_row_failure": "Yes", "used": "70000 MiB"}, devices=0)
    report = site.doctor(capsys, "--script", "job.sh", "--distributed.interface=ib0")
    assert report.bad() == []
    said = {each["check"]: each["sentence"] for each in report.told["findings"]}
    assert said["nodes"].endswith("--allocation in the job looks at them")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobid", "7"], "--jobid names a Slurm allocation: use it with --allocation"),
        (["--script", "gone.sh"], "gone.sh cannot be read: No such file"),
        (["--allocation"], "this is not a Slurm job"),
    ],
)
def test_a_wrong_command_line(
    site: Site, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        site.patch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "c.toml", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
