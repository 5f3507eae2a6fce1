"""Faults that a site can have are found, each by its check and no other, and nothing is found where
all is well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from harness import PYTHON, ROOT
from plants import FAULTS, IN_JOB, offline
from sick_site import Report, Site, mounted

from kempner.insight.doctor import examine
from kempner.insight.doctor.facts.slurm import look_at_slurm

Bad = list[tuple[str, str, str]]


@pytest.mark.parametrize("arguments", [(), IN_JOB, ("--nproc", "2")], ids=["alone", "job", "two"])
def test_nothing_is_found_where_all_is_well(
    site: Site, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    before = sorted(site.folder.rglob("*"))
    report = site.doctor(capsys, *arguments)
    assert (report.bad(), report.code) == ([], 0)
    assert sorted(site.folder.rglob("*")) == before


def test_nothing_is_found_with_gpus_that_are_well(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.gpus({}, {})
    report = site.doctor(capsys, "--nproc", "2")
    assert (report.bad(), report.code) == ([], 0)
    said = {each["check"]: each["sentence"] for each in report.told["findings"]}
    assert said["GPU health"] == "2 x NVIDIA H100 80GB HBM3: nothing wrong"
    assert said["ranks and GPUs"] == "2 ranks per node, 2 GPUs"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(
    site: Site, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plant, arguments, check, level, words = FAULTS[name]
    plant(site)
    report = site.doctor(capsys, *arguments)
    bad = report.bad()
    assert [(found, how) for found, how, _ in bad] == [(check, level)], bad
    assert words in bad[0][2]
    assert report.code == (2 if level == "fail" else 0)


def test_a_cache_that_is_there_is_no_fault(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    offline(site)
    (site.folder / "no-cache" / "hub").mkdir(parents=True)
    assert site.doctor(capsys).bad() == []


def test_ports_that_are_taken(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        report = site.doctor(capsys, f"--supervise.control_ports={port}-{port}")
    ((check, level, sentence),) = report.bad()
    assert (check, level) == ("ports", "fail")
    assert f'no port of supervise.control_ports="{port}-{port}" is free' in sentence
    assert site.doctor(capsys, f"--supervise.control_ports={port}-{port}").bad() == []


def test_a_controller_that_is_away(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "SHORTLY", 0.0)
    site.slurm(away="")
    ((check, level, sentence),) = site.doctor(capsys, *IN_JOB).bad()
    assert (check, level) == ("Slurm", "fail")
    assert "Unable to contact slurm controller" in sentence
    # On a laptop that happens to have the commands it is none, nor where `kempner init` has written
    # the batch scripts; and it is not waited for.
    no_cluster = "scontrol: fatal: Could not establish a configuration source"
    answering = (site.folder / "bin" / "scontrol").read_text()
    site.command("scontrol", f"#!/bin/sh\necho '{no_cluster}' >&2\nexit 1\n")
    site.command("sbatch", "#!/bin/sh\n")
    monkeypatch.setattr(examine, "look_at_slurm", None)
    assert site.doctor(capsys).bad() == []
    (site.folder / "scripts" / "slurm").mkdir(parents=True)
    (site.folder / "scripts" / "slurm" / "multinode.sh").write_text(Path("job.sh").read_text())
    assert site.doctor(capsys).bad() == []
    monkeypatch.setattr(examine, "look_at_slurm", look_at_slurm)
    (site.folder / "slurm" / "away").unlink()
    site.command("scontrol", answering)
    said = {each["check"]: each["sentence"] for each in site.doctor(capsys).told["findings"]}
    assert "scripts/slurm/multinode.sh" in said["mesh"]


def on_a_disk(site: Site, capsys: pytest.CaptureFixture[str], options: str, *arguments: str) -> Bad:
    with mounted(site.folder / "disk", options) as disk:
        if "ro" in options:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        return site.doctor(capsys, f"--checkpoint.dir={disk}/ckpt", *arguments).bad()


def test_a_disk_without_room_for_one_checkpoint(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = on_a_disk(site, capsys, "size=512k")
    assert {(check, level) for check, level, _ in bad} == {("space", "fail"), ("start", "fail")}
    assert "a checkpoint needs about 887.4 kB" in bad[0][2]


def test_a_disk_without_room_for_all_that_are_kept(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    ((check, level, sentence),) = on_a_disk(site, capsys, "size=3m")
    assert (check, level) == ("space", "warn")
    assert "4 more checkpoints of about 887.4 kB are to come" in sentence
    assert on_a_disk(site, capsys, "size=8m", "--checkpoint.keep_last=2") == []


def test_a_full_disk(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(site.folder / "disk", "size=2m") as disk:
        (disk / "ballast").write_bytes(bytes(2**21))
        report = site.doctor(capsys, f"--checkpoint.dir={disk}")
    bad = {check: sentence for check, _, sentence in report.bad()}
    assert [*bad] == ["start", "shared folders", "space"]
    assert f"{disk} cannot be written: No space left on device" in bad["shared folders"]


def test_a_disk_without_inodes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    ((check, level, sentence),) = on_a_disk(site, capsys, "size=64m,nr_inodes=20")
    assert (check, level) == ("inodes", "fail")
    assert "checkpoints of 1 rank need 72" in sentence


def test_a_disk_that_is_read_only(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    ((check, level, sentence),) = on_a_disk(site, capsys, "ro,size=64m")
    assert (check, level) == ("shared folders", "fail")
    assert "disk cannot be written: Read-only file system" in sentence


def test_a_machine_with_low_limits_and_a_broken_torch(site: Site) -> None:
    """All at once, in a process of its own: that costs a start."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    broken = site.folder / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    Path("tokens/part-1.tokens").chmod(0)
    limits = "ulimit -n 200; mount -t tmpfs -o size=16m tmpfs /dev/shm"
    mortal = "setpriv --bounding-set=-dac_override,-dac_read_search"  # root reads everything
    doctor = f"{mortal} {PYTHON} -m kempner doctor c.toml --json --distributed.interface=lo"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", f"{limits}; exec {doctor}"],
        env={**os.environ, "PYTHONPATH": f"{broken}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    bad = Report(json.loads(done.stdout), done.returncode).bad()
    words = {check: sentence for check, _, sentence in bad}
    assert [*words] == ["data", "software", "interface", "open files", "/dev/shm"]
    assert "token file tokens/part-1.tokens cannot be read: Permission denied" in words["data"]
    assert "libcudart.so.12: no such file" in words["software"]
    assert "distributed.interface=lo is down or has no IPv4 address" in words["interface"]
    assert "may open 200 files (`ulimit -Hn`), and a rank of 1 needs 260" in words["open files"]
    assert "/dev/shm has 16.8 MB free of 16.8 MB" in words["/dev/shm"]
    assert done.returncode == 2
