"""Mistakes in setting up a container or a job: recognised in the words that people reported."""

from __future__ import annotations

import pytest

from kempner.insight.triage.table.everything import TABLE, suspicious

STEPD = "slurmstepd: error: pyxis: "


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("srun: unrecognized option '--container-image=ubuntu'", "no_container_plugin"),
        (f"{STEPD}    Write failed because No space left on device", "container_cache"),
        (
            "FATAL:   While making image from oci registry: error fetching image to cache: writing "
            "blob: write /home/me/.apptainer/cache/blob/oci-put-blob1: disk quota exceeded",
            "container_cache",
        ),
        (
            f"{STEPD}    mkdir: cannot create directory '/run/enroot': Permission denied",
            "container_folders",
        ),
        (f"{STEPD}failed to import docker image", "container_image"),
        (f"{STEPD}couldn't start container", "container_image"),
        (
            f"{STEPD}    [ERROR] URL https://ghcr.io/token returned error code: 403 Forbidden",
            "container_image",
        ),
        (
            "FATAL:   While making image from oci registry: error fetching image: failed to get "
            "checksum for docker://pytorch/pytorch:TAG: MANIFEST_UNKNOWN: manifest unknown",
            "container_image",
        ),
        (
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: "
            "cannot open shared object file: no such file or directory",
            "container_gpus",
        ),
        (
            "FATAL:   container creation failed: mount hook function failure: mount "
            "/data->/data error: while mounting /data: mount source /data doesn't exist",
            "container_mount",
        ),
        (
            "FATAL:   container creation failed: mount hook function failure: mount /opt/cray->"
            "/opt/cray error: while mounting /opt/cray: destination /opt/cray doesn't exist in "
            "container",
            "container_mount",
        ),
        (
            "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x3.",
            "cpu_binding",
        ),
        (
            "srun: error: Task launch for StepId=7935525.0 failed on node node7: Unable to satisfy "
            "cpu bind request",
            "cpu_binding",
        ),
        (
            "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are "
            "mutually exclusive.",
            "contradictory_options",
        ),
        (
            "srun: fatal: cpus-per-task set by two different environment variables "
            "SLURM_CPUS_PER_TASK=4 != SLURM_TRES_PER_TASK=cpu=1",
            "contradictory_options",
        ),
        (
            "srun: fatal: cpus_per_task set by two different environment variables "
            "SLURM_CPUS_PER_TASK=2 != SLURM_TRES_PER_TASK=cpu:4",
            "contradictory_options",
        ),
        ("sbatch: error: invalid partition specified: gpu", "job_refused"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            "job_refused",
        ),
        (
            "srun: error: Unable to create step for job 5: Invalid generic resource (gres) "
            "specification",
            "job_refused",
        ),
        (
            "salloc: error: Job submit/allocate failed: Requested node configuration is not "
            "available",
            "job_refused",
        ),
        ("uv: command not found", None),
        ("bash: line 3: uv: command not found", "command_not_found"),
        ("INFO:    Could not find any nv files on this host!", None),  # harmless on a CPU
    ],
)
def test_a_mistake_is_recognised_by_its_words(line: str, cause: str | None) -> None:
    found = next((c.name for sign, c in TABLE if sign.regex.search(line)), None)
    assert found == cause
    assert cause is None or suspicious(line)
