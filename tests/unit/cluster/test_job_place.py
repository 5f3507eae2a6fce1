"""Where in its job a process is, on three versions of Slurm, whatever its variables say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from kempner.cluster.machine import (
    JobPlace,
    Process,
    find_place,
    place_in_job,
    step_of_group,
)

GROUPS = {
    "22.05": "4:memory:/slurm/uid_0/{job}/step_{step}/task_0\n1:name=systemd:/init\n0::/\n",
    "24.11": "0::/system.slice/slurmstepd.scope/{job}/step_{step}/user/task_0\n",
    "26.05": "0::/system.slice/lab_slurmstepd.scope/{job}/step_{step}/user/task_0\n",
}
FOLDERS = {"22.05": "job_7", "24.11": "job_7", "26.05": "s4ETMVWNQ8YR00"}
LEAKED = ["", "0", "3", "-5", "-6", "4294967291", "4294967290"]
"""What SLURM_STEP_ID may be in the shell that called sbatch, none of it about this job."""


@dataclass(frozen=True)
class Case:
    """A process of job 7: its step by Slurm, its SLURM_STEP_ID, its script and its ancestors."""

    version: str
    step: str
    variable: str
    place: JobPlace
    script: str = "23"
    line: tuple[int, ...] = (23,)
    sessions: tuple[int, ...] = (18,)
    grouped: bool = True
    titled: bool = True

    @property
    def id(self) -> str:
        seen = ("group" if self.grouped else "") + ("title" if self.titled else "")
        return f"{self.version}-{self.step}-{self.variable}-{self.line}-{self.sessions}-{seen}"

    def found(self) -> JobPlace:
        environ = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": self.script}
        if self.variable:
            environ["SLURM_STEP_ID"] = self.variable
        group = GROUPS[self.version].format(job=FOLDERS[self.version], step=self.step)
        line = [Process(*pair, "bash") for pair in zip(self.line, self.sessions, strict=True)]
        daemon = Process(19, 18, f"slurmstepd: [7.{self.step}]" if self.titled else "slurmstepd")
        return place_in_job(environ, group if self.grouped else "0::/\n", [*line, daemon])


def cases() -> Iterator[Case]:
    for version in GROUPS:
        own = {"batch": "-5", "interactive": "-6"} if version == "26.05" else {}
        script = Case(version, "batch", own.get("batch", ""), JobPlace.BATCH_SCRIPT)
        shell = replace(script, place=JobPlace.SHELL)
        step = Case(version, "0", "0", JobPlace.STEP)
        for told in (
            script,
            replace(script, line=(41, 40, 23), sessions=(18, 18, 18)),
            replace(shell, line=(51, 50, 23), sessions=(50, 50, 18)),  # Jupyter's terminal
            replace(shell, script="999"),  # in a container with process ids of its own
            replace(shell, script=""),
            step,
            replace(step, step="3", variable="3", line=(41, 23), sessions=(18, 18)),
            replace(step, step="interactive", variable=own.get("interactive", "4294967290")),
        ):
            for grouped, titled in ((True, True), (True, False), (False, True), (False, False)):
                yield replace(told, grouped=grouped, titled=titled)
        for variable in LEAKED:  # sbatch from within a step, tmux, Jupyter, `srun --pty`
            for grouped, titled in ((True, True), (True, False), (False, True)):
                yield replace(script, variable=variable, grouped=grouped, titled=titled)


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.id)
def test_where_a_process_is_in_its_job(case: Case) -> None:
    assert case.found() is case.place


@pytest.mark.parametrize("variable", ["0", "3"])
def test_where_nothing_else_is_seen_a_number_of_srun_is_a_step(variable: str) -> None:
    hidden = Case("22.05", "batch", variable, JobPlace.STEP, grouped=False, titled=False)
    assert hidden.found() is JobPlace.STEP


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize("step", ["batch", "0", "extern"])
@pytest.mark.parametrize("variable", ["", "0", "-5", "4294967290"])
def test_a_shell_of_salloc_in_another_jobs_step_is_in_none_of_its_own(
    version: str, step: str, variable: str
) -> None:
    environ = {"SLURM_JOB_ID": "8", "SLURM_TASK_PID": "23", "SLURM_STEP_ID": variable}
    group = GROUPS[version].format(job=FOLDERS[version], step=step)
    line = [Process(23, 18, "bash"), Process(19, 18, f"slurmstepd: [7.{step} stepmgr]")]
    assert place_in_job(environ, group, line) is JobPlace.SHELL


@pytest.mark.parametrize("job", ["7", "8"])
def test_a_task_of_any_component_of_a_heterogeneous_job_is_in_its_step(job: str) -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
    }
    line = [Process(23, 18, "bash"), Process(19, 18, f"slurmstepd: [{job}.0]")]
    assert place_in_job(environ, "0::/\n", line) is JobPlace.STEP


@pytest.mark.parametrize("variable", ["", "-5"])
def test_a_shell_of_salloc_on_the_login_node_is_no_script(variable: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": variable}
    assert place_in_job(environ, "0::/user.slice\n", [Process(60, 60)]) is JobPlace.SHELL


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/slurm/uid_0/job_7/step_batch", ("7", "batch")),
        ("/slurm_node1/uid_0/job_7/step_12/task_3", ("7", "12")),
        ("/a/job_7/step_0/user/task_0/b/s4ETMV/step_extern/user", ("s4ETMV", "extern")),
        ("/slurm/uid_0/job_7/step_5+1/task_0", ("7", "5")),
        ("/slurm/uid_0/job_7", None),
        ("/job_7/step_batches/task_0", None),
    ],
)
def test_a_group_names_its_step(path: str, found: Sequence[str] | None) -> None:
    step = step_of_group(path)
    assert (step and (step.job, step.step)) == found


def test_this_process_is_in_no_script() -> None:
    assert find_place({}) is JobPlace.SHELL
