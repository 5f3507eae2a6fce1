"""A site at which all is well, and the faults that can be planted in it.

Files, disks, ports and limits are real. Of Slurm and nvidia-smi there are commands that print what
the real ones print: tests/slurm/jobs/test_doctor_in_allocation.py has a real Slurm.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, python_script, write_tokens

from kempner.cli.entry import main
from kempner.probe import node
from kempner.probe.details import Software

CONFIG = """
[model]
dim = 32
n_layers = 2
n_heads = 4
[train]
seq_len = 32
global_batch_size = 16
[data]
dataset_path = "tokens"
[eval]
interval = 10
dataset_path = "held-out"
"""

SCRIPT = """#!/bin/bash
# Two nodes of four GPUs.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --partition=gpu
set -e
#SBATCH --nodes=77
exec kempner supervise "$@"
"""

PARTITION = (
    "PartitionName=gpu AllowGroups=ALL Default=YES GraceTime=60 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=2-00:00:00 Nodes=node[1-8] PriorityTier=1 PreemptMode=REQUEUE State=UP TotalNodes=8"
)

_SCONTROL = """#!/bin/sh
cd "{folder}/slurm"
case "$2" in
config)
    test -e away && {{ echo "scontrol: error: Unable to contact slurm controller" >&2; exit 1; }}
    date -u -d "$(cat ahead) seconds" "+Configuration data as of %Y-%m-%dT%H:%M:%S"
    echo "KillWait                = 30 sec"
    echo "SlurmdTimeout           = 300 sec";;
partition) cat partition;;
job) cat job;;
*) exit 1;;
esac
"""

_SACCT = """#!/bin/sh
test -e "{folder}/slurm/no-accounts" || exit 0
echo "Slurm accounting storage is disabled" >&2
exit 1
"""

_SRUN = """
import json, os, subprocess, sys
from dataclasses import replace
from kempner.probe.node import answer_lines, read_results
faults = json.load(open("{folder}/slurm/faults"))
options = [word for word in sys.argv[1:] if word.startswith("--")]
task = sys.argv[1 + len(options):]
(nodes,) = (word.partition("=")[2] for word in options if word.startswith("--nodelist="))
started = {{}}
for node in nodes.split(","):
    fault = faults.get(node, {{}})
    if "silent" in fault:
        print("srun: error: " + node + ": " + fault["silent"], file=sys.stderr)
        continue
    environ = {{**os.environ, "SLURMD_NODENAME": node, **fault.get("environ", {{}})}}
    number = node.removeprefix("node")
    make = [
        "ip link add ib0 type veth peer name switch",
        "ip link set switch up",
        "mount -t sysfs sysfs /sys",
        "ip addr add 10.10.0." + number + "/24 dev ib0",
        *([] if "link" in fault else ["ip link set ib0 up"]),
        *(["mount -t tmpfs tmpfs '" + fault["hides"] + "'"] if "hides" in fault else []),
    ]
    alone = ["unshare", "--net", "--mount", "sh", "-c", " && ".join(make) + ' && exec "$@"', "sh"]
    started[node] = subprocess.Popen(
        [*alone, *task], env=environ, stdout=subprocess.PIPE, text=True
    )
for node, process in started.items():
    (told,) = read_results(process.communicate()[0].splitlines())
    ahead = faults.get(node, {{}}).get("ahead", 0)
    print(answer_lines(replace(told, time=told.time + ahead)), end="")
"""

_TORCH = """
__version__ = "{version}"
class version:
    cuda, hip = "12.8", None
class cuda:
    is_available = staticmethod(lambda: False)
"""


@dataclass
class Site:
    """The working directory of a user, with a configuration, a batch script, data and a cluster."""

    folder: Path
    patch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.patch.chdir(self.folder)
        Path("c.toml").write_text(CONFIG)
        Path("job.sh").write_text(SCRIPT)
        self.tokens("tokens", range(300), range(50))
        self.tokens("held-out", range(100))
        Path("bin").mkdir()
        Path("slurm").mkdir()
        self.slurm(ahead="0", partition=PARTITION + "\n", faults="{}")
        srun = python_script(_SRUN.format(folder=self.folder))
        for name, text in {"scontrol": _SCONTROL, "sacct": _SACCT}.items():
            self.command(name, text.format(folder=self.folder))
        self.command("srun", srun)
        path = [str(self.folder / "bin"), os.environ["PATH"]]
        self.patch.setenv("PATH", ":".join(path))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
            self.patch.delenv(name, raising=False)
        self.software()

    def command(self, name: str, text: str) -> None:
        """Put a command on the PATH."""
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def slurm(self, **files: str) -> None:
        """What Slurm's commands print."""
        for name, text in files.items():
            (self.folder / "slurm" / name.replace("_", "-")).write_text(text)

    def script(self, old: str, new: str) -> None:
        """Change a line of the batch script."""
        assert old in SCRIPT
        Path("job.sh").write_text(SCRIPT.replace(old, new))

    def tokens(self, folder: str, *shards: range, tokenizer: str = "{}") -> None:
        """Prepared data, with the tokenizer beside it."""
        write_tokens(Path(folder), shards)
        index = json.loads(Path(folder, "index.json").read_text())
        digest = hashlib.sha256(tokenizer.encode()).hexdigest()
        index["tokenizer"] = {"kind": "huggingface", "fingerprint": digest}
        Path(folder, "index.json").write_text(json.dumps(index))
        Path(folder, "tokenizer.json").write_text(tokenizer)

    def software(self, **changes: Any) -> None:
        """What the dry run of torch would say; it takes ten seconds."""
        told = Software(**{"python": "3.11.7", "kempner": "0.1", "torch": "2.13.0", **changes})
        self.patch.setattr(node, "look_at_software", lambda imports: told)

    def torch(self, name: str, version: str) -> str:
        """A folder for PYTHONPATH in which torch is next to nothing."""
        folder = self.folder / name / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(_TORCH.format(version=version))
        return f"{folder.parent}:{ROOT}"

    def gpus(self, *gpus: Mapping[str, str], devices: int | None = None) -> None:
        """What nvidia-smi prints, and how many GPUs torch can use."""
        (self.folder / "smi.xml").write_text(smi(*gpus))
        self.command("nvidia-smi", f'#!/bin/sh\ncat "{self.folder}/smi.xml"\n')
        self.software(cuda="12.8", devices=len(gpus) if devices is None else devices)

    def doctor(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> Report:
        """`kempner doctor c.toml --json` with these arguments."""
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "c.toml", "--json", *arguments])
        return Report(json.loads(capsys.readouterr().out), int(str(ended.value.code)))


@dataclass(frozen=True)
class Report:
    """What the doctor said."""

    told: dict[str, Any]
    code: int

    def bad(self) -> list[tuple[str, str, str]]:
        """Check, level and sentence of all that is not well."""
        return [
            (each["check"], each["level"], each["sentence"])
            for each in self.told["findings"]
            if each["level"] in ("warn", "fail")
        ]

    def nodes(self, check: str) -> list[list[str]]:
        """The nodes of the bad findings of a check."""
        return [
            each["nodes"]
            for each in self.told["findings"]
            if each["check"] == check and each["level"] in ("warn", "fail")
        ]


WELL = {
    "dram_uncorrectable": "0",
    "remapped_row_pending": "No",
    "remapped_row_failure": "No",
    "clocks_event_reason_gpu_idle": "Active",
    "clocks_event_reason_hw_thermal_slowdown": "Not Active",
    "used": "4 MiB",
    "pid": "",
}
"""A GPU that nothing is wrong with."""


def smi(*gpus: Mapping[str, str]) -> str:
    """The parts of `nvidia-smi -q -x` that are read, as a driver 550 prints them for H100s."""
    found = []
    for changes in gpus:
        v = {**WELL, **changes}
        process = f"<process_info><pid>{v['pid']}</pid><type>C</type></process_info>"
        found.append(
            f"""<gpu id="00000000:18:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
            <fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved>
            <used>{v["used"]}</used></fb_memory_usage>
            <clocks_event_reasons>
            <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
            <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
            <clocks_event_reason_hw_thermal_slowdown>{v["clocks_event_reason_hw_thermal_slowdown"]}
            </clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
            <ecc_errors><volatile><sram_correctable>3</sram_correctable>
            <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
            <dram_correctable>12</dram_correctable>
            <dram_uncorrectable>{v["dram_uncorrectable"]}</dram_uncorrectable></volatile>
            <aggregate><dram_uncorrectable>1</dram_uncorrectable></aggregate></ecc_errors>
            <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
            <remapped_rows><remapped_row_corr>0</remapped_row_corr>
            <remapped_row_pending>{v["remapped_row_pending"]}</remapped_row_pending>
            <remapped_row_failure>{v["remapped_row_failure"]}</remapped_row_failure></remapped_rows>
            <processes>{process if v["pid"] else ""}</processes></gpu>"""
        )
    return (
        '<?xml version="1.0" ?><nvidia_smi_log><driver_version>550.54.15</driver_version>'
        f"{''.join(found)}</nvidia_smi_log>"
    )


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A real tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
