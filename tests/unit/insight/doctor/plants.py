"""Faults that are planted in a site, one at a time, and what is to be said of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sick_site import PARTITION, Site

from kempner.probe import node
from kempner.probe.details import WriteRate
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.gave_up import GaveUp, write
from kempner.run.record.run_dir import RunDirectory

MIB = 2**20
IN_JOB = ("--script", "job.sh")
SLOW = ("--model.dim=512", "--model.n_layers=8", "--model.ffn_dim=2048")
"""A model whose checkpoint has a few hundred MB."""

Plant = Callable[[Site], None]


def _nothing(site: Site) -> None:
    """The fault is on the command line."""


def _other_tokenizer(site: Site) -> None:
    Path("tokens/tokenizer.json").write_text('{"another": 1}')


def _other_held_out(site: Site) -> None:
    site.tokens("held-out", range(100), tokenizer='{"another": 1}')


def _cut_off(site: Site) -> None:
    os.truncate("tokens/part-1.tokens", 100)


def _damaged_index(site: Site) -> None:
    Path("tokens/index.json").write_text("\0" * 100)


def _given_up(site: Site) -> None:
    run = RunDirectory(Path("runs/c"))
    run.path.mkdir(parents=True)
    write(run, GaveUp(ExitCode.DIVERGED, "the loss diverged", 3))


def _file_in_the_way(site: Site) -> None:
    Path("runs").write_text("")


def _no_torch_for_gpus(site: Site) -> None:
    site.gpus({}, {}, devices=0)
    site.software(torch="2.13.0+cpu")


def _lost_gpu(site: Site) -> None:
    said = "Unable to determine the device handle for GPU0000:18:00.0: GPU is lost."
    site.command("nvidia-smi", f'#!/bin/sh\necho "{said}"\nexit 15\n')


def _slow_storage(site: Site) -> None:
    slow = WriteRate(4 * MIB, 2.0)
    site.patch.setattr(node, "write_test", lambda *given: slow)


def offline(site: Site) -> None:
    site.patch.setenv("HF_HUB_OFFLINE", "1")
    site.patch.setenv("HF_HOME", str(site.folder / "no-cache"))


def _gpu(**fault: str) -> Plant:
    return lambda site: site.gpus({}, fault)


def _script(old: str, new: str) -> Plant:
    return lambda site: site.script(old, new)


def _slurm(**files: str) -> Plant:
    return lambda site: site.slurm(**files)


def _both(*plants: Plant) -> Plant:
    def plant(site: Site) -> None:
        for each in plants:
            each(site)

    return plant


GPUS = ("--nproc", "2")
SIGNAL = "--signal=B:SIGTERM@120"
FAULTS: dict[str, tuple[Plant, tuple[str, ...], str, str, str]] = {
    "unknown key": (
        _nothing, ("--train.stepz=3",),
        "configuration", "fail", "stepz",
    ),
    "mesh product": (
        _nothing, (*IN_JOB, "--parallelism.data_parallel_shard_degree=3"),
        "mesh", "fail", "= 3 ranks, but there are 8",
    ),
    "tensor group over nodes": (
        _nothing,
        (*IN_JOB, "--parallelism.tensor_parallel_degree=8", "--model.n_heads=8",
         "--model.vocab_multiple=8"),
        "mesh", "fail", "tensor_parallel_degree=8 does not divide the 4 ranks of a node",
    ),
    "batch smaller than the world": (
        _nothing, (*IN_JOB, "--train.global_batch_size=4"),
        "mesh", "warn", "only 4 of 8 data parallel ranks",
    ),
    "tasks and GPUs of the script": (
        _script("--ntasks-per-node=4", "--ntasks-per-node=2"), IN_JOB,
        "ranks and GPUs", "fail", "set --ntasks-per-node=4",
    ),
    "more ranks than GPUs": (
        _gpu(), ("--nproc", "4"),
        "ranks and GPUs", "fail", "4 ranks per node for 2 GPUs",
    ),
    "torch for CPUs alone": (
        _no_torch_for_gpus, GPUS,
        "ranks and GPUs", "fail", "torch 2.13.0+cpu is built for CPUs alone",
    ),
    "a GPU that is lost": (
        _lost_gpu, GPUS,
        "ranks and GPUs", "fail", "GPU is lost",
    ),
    "ECC": (
        _gpu(dram_uncorrectable="2"), GPUS,
        "GPU health", "fail", "GPU 1 has had 2 uncorrected memory errors",
    ),
    "rows to be replaced": (
        _gpu(remapped_row_pending="Yes"), GPUS,
        "GPU health", "warn", "GPU 1 waits for a reset",
    ),
    "rows that cannot be replaced": (
        _gpu(remapped_row_failure="Yes"), GPUS,
        "GPU health", "fail", "GPU 1 cannot replace broken rows",
    ),
    "heat": (
        _gpu(clocks_event_reason_hw_thermal_slowdown="Active"), GPUS,
        "GPU health", "warn", "GPU 1 is slowed down (hw thermal slowdown)",
    ),
    "memory left over": (
        _gpu(used="70000 MiB", pid="4711"), GPUS,
        "GPU health", "warn", "GPU 1 has 73.4 GB in use by 4711",
    ),
    "a model too large for the GPU": (
        _gpu(),
        (*GPUS, "--train.micro_batch_size=2000000", "--train.global_batch_size=4000000"),
        "GPU memory", "fail", "the smallest GPU has 85.5 GB",
    ),
    "no data": (
        _nothing, ("--data.dataset_path=typo",),
        "data", "fail", "typo is not prepared data",
    ),
    "a token file cut off": (
        _cut_off, (),
        "data", "fail", "part-1.tokens has 100 bytes, the index says 164",
    ),
    "a damaged index": (
        _damaged_index, (),
        "data", "fail", "tokens/index.json is not an index",
    ),
    "another tokenizer": (
        _other_tokenizer, (),
        "tokenizer", "fail", "is not the tokenizer that made the tokens beside it",
    ),
    "vocabulary too small": (
        _nothing, ("--model.vocab_size=256",),
        "tokenizer", "fail", "set --model.vocab_size=257",
    ),
    "held-out data of another tokenizer": (
        _other_held_out, (),
        "held-out data", "fail", "prepared with another tokenizer",
    ),
    "no held-out data": (
        _nothing, ("--eval.dataset_path=gone",),
        "held-out data", "fail", "gone is not prepared data",
    ),
    "a run that was given up": (
        _given_up, (),
        "run", "fail", "gave up after attempt 3: the loss diverged",
    ),
    "a file in the place of a folder": (
        _file_in_the_way, (),
        "start", "fail", "runs is a file",
    ),
    "offline without a cache": (
        offline, (),
        "offline caches", "warn", "HF_HUB_OFFLINE is set, and",
    ),
    "an interface that is not there": (
        _nothing, ("--distributed.interface=ib7",),
        "interface", "fail", "distributed.interface=ib7 does not exist on this node",
    ),
    "a warning too short": (
        _both(_slow_storage, _slurm(partition=PARTITION.replace("=60", "=9000") + "\n")),
        (*IN_JOB, *SLOW),
        "warning", "warn", "write `#SBATCH --signal=B:SIGTERM@",
    ),
    "no warning": (
        _script(f"#SBATCH {SIGNAL}\n", ""), IN_JOB,
        "warning", "warn", "asks for no warning before the time limit: add `#SBATCH --signal=B:",
    ),
    "a warning that misses the script": (
        _script(SIGNAL, "--signal=SIGTERM@120"), IN_JOB,
        "warning", "warn", "does not reach the batch script",
    ),
    "a job shorter than its warning": (
        _script("--time=24:00:00", "--time=2"), IN_JOB,
        "warning", "fail", "it would stop as it begins",
    ),
    "a job too short for a save": (
        _both(_script("--time=24:00:00", "--time=5"), _slow_storage,
              _slurm(partition=PARTITION.replace("=60", "=9000") + "\n")),
        (*IN_JOB, *SLOW),
        "warning", "fail", "and the job has 300 s",
    ),
    "a preemption too short": (
        _both(_slow_storage, _script(SIGNAL, "--signal=B:SIGTERM@1200")), (*IN_JOB, *SLOW),
        "preemption", "warn", "leaves 90 s, and a save takes",
    ),
    "no requeue": (
        _script("--requeue", "--no-requeue"), IN_JOB,
        "requeue", "warn", "job.sh may not be requeued",
    ),
    "more time than the partition gives": (
        _script("--time=24:00:00", "--time=3-0"), IN_JOB,
        "partition", "fail", "--time asks for 72.0 h, and partition gpu gives 48.0 h",
    ),
    "a partition that is down": (
        _slurm(partition=PARTITION.replace("State=UP", "State=DOWN") + "\n"), IN_JOB,
        "partition", "fail", "partition gpu is not up",
    ),
    "no accounting": (
        _slurm(no_accounts=""), IN_JOB,
        "Slurm", "warn", "the accounting does not answer",
    ),
    "a controller with another clock": (
        _slurm(ahead="100"), IN_JOB,
        "clock", "fail", "the clock of Slurm's controller is",
    ),
}  # fmt: skip
"""By name: how it is planted, arguments, and the check, the level and the words that tell of it."""
