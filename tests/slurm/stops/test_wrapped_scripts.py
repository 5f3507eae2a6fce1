"""Batch scripts as people write them, changed by `kempner wrap`: warned, requeued, resumed, or
refused; and a job that `kempner stop` ends for good."""

from __future__ import annotations

import json
import re
import shutil
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from drilling import note
from harness import KEMPNER, ROOT, wait_until
from stand_ins import MODULE, install
from submitting import Project

from kempner.run.output.units import count
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(400)

SCRIPTS = ROOT / "tests" / "unit" / "project" / "batch_scripts"

TRAIN = """
import json, os, pathlib, signal, sys, time
task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun numbers its ranks itself
    assert rank == os.environ["SLURM_PROCID"], rank
place = pathlib.Path(f"told{task}-{rank}-of-{world}")
count = int(place.read_text().split()[-1]) if place.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def tell(word):
    with place.open("a") as file:
        file.write(f"{word} {count}\\n")
seen = {"arguments": " ".join(sys.argv[1:]), **os.environ}
pathlib.Path(f"seen{task}-{rank}").write_text(json.dumps(seen))
tell("from")
while not pathlib.Path("finish").exists():
    count += 1
    time.sleep(0.05)
    if asked:
        tell("stopped")
        raise SystemExit(75)
pathlib.Path("results").mkdir(exist_ok=True)
tell("done")
"""


@dataclass(frozen=True)
class Case:
    """A script on this cluster. `changes` are what the cluster has otherwise: places, GPUs, CPUs;
    `seen` is what each rank must find in its environment, or as its `arguments`."""

    what: str
    ranks: int = 1
    changes: Sequence[tuple[str, str]] = ()
    seen: Mapping[str, str] = field(default_factory=dict)
    program: str = "train.py"
    arguments: Sequence[str] = ()


BASIC = {
    "trap_exit": Case(
        "scratch folder, trap on EXIT, python, then a copy of the results",
        changes=[("/scratch/$USER.", "$PWD/scratch."), ("/archive/$SLURM_JOB_ID", "archive")],
    ),
    "heredoc_config": Case(
        "configuration by a here-document, srun of two tasks", 2, [("gpu:a100:2", "gpu:2")]
    ),
    "array_conda": Case(
        "job array of two, modules, conda activate, srun",
        changes=[("--array=0-9%3", "--array=0-1"), ("#SBATCH --mem=32G\n", "")],
        seen={"CONDA_DEFAULT_ENV": "rl", "LOADEDMODULES": "cuda/12.4:anaconda3"},
    ),
    "torchrun_one_node": Case(
        "torchrun --standalone of four ranks",
        4,
        [("--cpus-per-task=32", "--cpus-per-task=4"), ("-t 1-00:00:00", "-t 60")],
        {"arguments": "config/train_gpt2.py --batch_size=12", "OMP_NUM_THREADS": "8"},
    ),
    "exec_redirect": Case(
        "cd && exec srun over two nodes, output into a file", 2, seen={"OMP_NUM_THREADS": "4"}
    ),
}

SECOND = {
    # Its tasks fill a node: later, it would be spread over several, with its GPU on one of them.
    "uv": Case("time uv run, with tasks to spare", seen={"arguments": "--steps 1000"}),
    "accelerate": Case(
        "virtual environment, accelerate launch of four ranks",
        4,
        seen={"arguments": "--model llama", "ACCELERATE_MIXED_PRECISION": "bf16"},
        program="finetune.py",
    ),
    "bash_c": Case(
        "srun bash -c with torch.distributed.run inside, two nodes",
        4,
        [("gpu:8", "gpu:2"), ("_node 8", "_node 2"), ("head -n 1)", "head -n 1)-ib")],
        {"arguments": "--deepspeed ds.json"},
    ),
    "lightning": Case(
        "the script of Lightning's manual: login shell, source activate, srun, SIGUSR1",
        8,
        [("gpu:8", "gpu:2"), ("ntasks-per-node=8", "ntasks-per-node=2")],
        {"CONDA_DEFAULT_ENV": "mine", "PYTHONFAULTHANDLER": "1"},
        arguments=["mine"],
    ),
    "plain": Case("virtual environment, python", seen={"arguments": "--epochs 90 --lr 0.1"}),
    "singularity_torchrun": Case(
        "apptainer exec torchrun of as many ranks as GPUs",
        2,
        seen={"arguments": "--bf16", "APPTAINER_CONTAINER": "image.sif"},
        program="trainer/main.py",
    ),
}

THIRD = {
    "modules": Case(
        "sh, modules, MASTER_ADDR by scontrol, srun --cpu-bind of eight tasks",
        8,
        [
            ("#!/bin/sh", "#!{folder}/bin/sh"),
            ("--partition=gpu --account=project_465000123", "--partition=low --account=lab"),
            ("--cpus-per-task=7", "--cpus-per-task=2"),
        ],
        {
            "LOADEDMODULES": "LUMI/24.03:partition/G:PyTorch/2.4.1",
            "arguments": "--config conf/base.yaml",
        },
        program="mypackage/pretrain.py",
    ),
    "odd_directives": Case(
        "#SBATCH lines of every form, srun -n 2", 2, [("-c 16", "-c 2")], {"WANDB_MODE": "offline"}
    ),
    "singularity": Case(
        "srun singularity exec of eight tasks, nodes of its own",
        8,
        seen={"arguments": "--fsdp", "APPTAINER_CONTAINER": "/shared/images/pytorch_25.09.sif"},
    ),
    "torchrun_nodes": Case(
        "the script of PyTorch's tutorial: srun torchrun over four nodes",
        4,
        [("/shared/examples/", "{folder}/"), ("--cpus-per-task=4", "--cpus-per-task=2")],
        {"arguments": "50 10", "LOGLEVEL": "INFO"},
        program="multinode_torchrun.py",
    ),
}

CASES: Mapping[str, Case] = {**BASIC, **SECOND, **THIRD}

REFUSED = {
    "background": "two programs in the background",
    "crlf": "line ends of Windows",
    "csh": "tcsh",
    "four_gpus": "uv run of one process on four GPUs",
    "loop_of_seeds": "srun within a loop",
    "megatron": "torchrun with its options in a variable",
    "mktemp": "scratch folder of mktemp among the arguments",
    "mpirun": "mpirun",
    "resubmits": "sbatch of itself",
    "srun_heredoc": "srun bash with a here-document",
    "steps_after": "preparation, training and evaluation",
    "tee": "output through tee",
    "trap_requeue": "trap of its own with scontrol requeue",
}


@dataclass
class Wrapped:
    """A job of a wrapped script, or an element of its array."""

    project: Project
    name: str
    job: str
    warning: str
    element: str = ""

    @property
    def folder(self) -> Path:
        return self.project.folder / self.name

    @property
    def id(self) -> str:
        return f"{self.job}_{self.element}" if self.element else self.job

    def told(self) -> list[list[str]]:
        """What each rank has said: words with the count that goes with them."""
        files = sorted(self.folder.glob(f"told{self.element}-*"))
        return [file.read_text().splitlines() for file in files]

    def started(self, times: int) -> bool:
        """Whether all ranks have begun so often, and work."""
        told = self.told()
        return len(told) == CASES[self.name].ranks and all(
            sum(line.startswith("from ") for line in lines) == times
            and lines[-1].startswith("from ")
            for lines in told
        )

    def events(self, name: str) -> list[str]:
        suffix = f"-{self.element}" if self.element else ""
        ledgers = self.folder.glob(f"runs/*{suffix}/ledger.jsonl")
        found = [event for ledger in ledgers for event in read_lines(ledger)]
        return [str(event) for event in found if event["event"] == name]

    def log(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("**/*.out"))
        )

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def reached() -> object:
            assert not self.events("gave_up"), f"{self.name} gave up"
            return condition()

        try:
            wait_until(reached, f"{self.name} {self.id}: {what}", 90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}\n{self.log()}") from None

    def warn(self) -> None:
        """Send the warning that the script asks Slurm for."""
        self.project.cluster.run(
            "login1", "scancel", "--batch", f"--signal={self.warning}", self.id
        )

    def assert_resumed(self) -> None:
        """Each rank was warned once, went on where it was, and saw what the script had set."""
        for lines in self.told():
            words = [line.split() for line in lines]
            assert [word for word, _ in words] == ["from", "stopped", "from", "done"]
            assert words[1][1] == words[2][1] != "0"
        for file in self.folder.glob(f"seen{self.element}-*"):
            seen = json.loads(file.read_text())
            assert CASES[self.name].seen.items() <= seen.items(), (self.name, seen)


def submit(project: Project, name: str) -> list[Wrapped]:
    """Wrap a script where it is submitted, and submit it."""
    folder, cluster, case = project.folder / name, project.cluster, CASES[name]
    lay_out(folder, case.program)
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    for before, after in case.changes:
        assert before in text
        text = text.replace(before, after.format(folder=folder))
    (folder / "job.sbatch").write_text(text)
    told = cluster.run("login1", *KEMPNER, "wrap", "job.sbatch", "--write", cwd=folder).stdout
    assert "sbatch --test-only: accepted" in told
    warning = re.search(r"--signal=B:(\w+)@", (folder / "job.sbatch").read_text())
    assert warning is not None
    path = f"{folder / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    environ = {"PATH": path, "HOME": str(folder / "home"), **MODULE}
    job = cluster.sbatch("job.sbatch", *case.arguments, cwd=folder, **environ)
    elements = ("0", "1") if name == "array_conda" else ("",)
    signal = f"SIG{warning[1].removeprefix('SIG')}"
    return [Wrapped(project, name, job, signal, element) for element in elements]


def lay_out(folder: Path, program: str) -> None:
    """What a script finds where it is submitted, and at home."""
    for name in ("bin", "logs", "data", "home"):
        (folder / name).mkdir(parents=True)
    install(folder / "bin")
    for name in ("python", "python3"):  # a link would not find what is installed beside it
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin" / "sh").symlink_to("/bin/bash")
    for name in ("venv", "home/envs/vision"):
        venv.create(folder / name, symlinks=True)
    (folder / "home" / ".bash_profile").write_text(f"PATH={folder / 'bin'}:$PATH\n")
    shutil.make_archive(str(folder / "data"), "tar", folder / "data")
    (folder / program).parent.mkdir(exist_ok=True)
    (folder / program).write_text(TRAIN)


def resume(project: Project, names: Sequence[str]) -> list[Wrapped]:
    """Warn the jobs of these scripts, and follow each to its end."""
    jobs = [job for name in names for job in submit(project, name)]
    for job in jobs:
        job.wait(lambda job=job: job.started(1), "its ranks")
    for job in jobs:
        job.warn()
    for job in jobs:
        job.wait(lambda job=job: job.events("requeued"), "the requeue")
    for job in jobs:
        job.wait(lambda job=job: job.started(2), "its return")
    for job in jobs:
        (job.folder / "finish").touch()
    for job in jobs:
        job.wait(lambda job=job: all(t[-1].startswith("done") for t in job.told()), "its end")
        project.cluster.wait_for(job.id, "COMPLETED")
        job.assert_resumed()
    return jobs


def test_wrapped_scripts_are_warned_requeued_and_resumed(project: Project) -> None:
    resume(project, list(BASIC))
    staged = project.folder / "trap_exit"
    assert (staged / "archive").is_dir()
    assert not list(staged.glob("scratch.*"))
    assert re.findall(r"^done: ", "".join(p.read_text() for p in staged.glob("slurm-*")), re.M)


@pytest.mark.drill  # `make test` has some of them above, and all as text: test_wrap.py
@pytest.mark.parametrize("cases", [BASIC, SECOND, THIRD], ids=["basic", "second", "third"])
def test_every_script_that_is_wrapped_is_resumed(
    project: Project, cases: Mapping[str, Case]
) -> None:
    jobs = {job.name: job for job in resume(project, list(cases))}
    for name, case in cases.items():
        ranks, warning = count(len(jobs[name].told()), "rank"), jobs[name].warning
        became = f"{ranks}: warned by {warning}, requeued, resumed"
        note("batch script", script=name, what=case.what, became=became)


@pytest.mark.drill
def test_every_other_script_is_refused_in_a_sentence(project: Project) -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sbatch")} == CASES.keys() | REFUSED.keys()
    for name, what in REFUSED.items():
        script = project.folder / f"{name}.sbatch"
        shutil.copy(SCRIPTS / script.name, script)
        before = script.read_bytes()
        command = (*KEMPNER, "wrap", script.name, "--write")
        ended = project.cluster.run("login1", *command, cwd=project.folder, check=False)
        assert ended.returncode == 2, name
        (line,) = ended.stdout.splitlines()
        expected = (SCRIPTS / f"{name}.expected").read_text()
        assert line == f"kempner: {script.name}: {expected.removeprefix('refused: ').rstrip()}"
        assert script.read_bytes() == before
        note("batch script", script=name, what=what, became=expected.rstrip())


@pytest.mark.every_slurm
def test_a_job_that_is_stopped_does_not_come_back(project: Project) -> None:
    (job,) = submit(project, "exec_redirect")
    job.wait(lambda: job.started(1), "its ranks")
    told = project.cluster.run("login1", *KEMPNER, "stop", job.job, cwd=job.folder).stdout
    assert "asked to stop after its step" in told
    assert [lines[-1].split()[0] for lines in job.told()] == ["stopped", "stopped"]
    assert not job.events("requeued")
    assert "stopped by kempner stop" in job.events("not_requeued")[0]
    # Slurm holds a job that it has requeued back for a while: it would be seen to be pending.
    ended = project.cluster.wait_for(job.job, "COMPLETED", "FAILED", "PENDING")
    assert ended == "FAILED"
    assert project.cluster.job(job.job)["ExitCode"] == "75:0"
