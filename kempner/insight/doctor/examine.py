"""Gathers the facts about a planned run, and checks each."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.command import SHORTLY, SlurmError
from kempner.config.sections import Config, HeldOutFolder
from kempner.insight.doctor.checks import fit, nodes, storage
from kempner.insight.doctor.facts.nodes import NodeQuestions, Survey, survey_here, survey_nodes
from kempner.insight.doctor.facts.slurm import JobPlan, SlurmFacts, look_at_slurm, there_is_slurm
from kempner.insight.doctor.facts.storage import (
    DataSet,
    Disk,
    RunState,
    find_data_set,
    look_at_disk,
    look_at_run,
    nearest,
)
from kempner.insight.doctor.finding import Finding, Level, fail, finding, passed, skipped
from kempner.model.spec.memory import checkpoint_bytes
from kempner.probe.node import DetailQuestion
from kempner.run.process.durable_io import probe_file_system
from kempner.run.process.exit_codes import RunError
from kempner.run.record.run_dir import RunDirectory

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables that make Hugging Face's libraries work without a network."""


@dataclass(frozen=True)
class Supervisor:
    """What only the supervisor knows: whether it would start a run (`ready` raises `RunError` with
    a sentence), and how long before a job's end it stops (`lead`)."""

    ready: Callable[[], object]
    lead: fit.Lead


@dataclass(frozen=True)
class Examination:
    """What to examine: a configuration, its ranks, its `allocation` (None outside of the job), and
    the `plan` of its batch script."""

    config: Config
    run: RunDirectory
    world: fit.PlannedWorld
    plan: JobPlan | None = None
    allocation: Allocation | None = None

    @property
    def uses_slurm(self) -> bool:
        return self.plan is not None or self.allocation is not None

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that are probed; empty without an allocation, when only this machine is."""
        allocation = self.allocation
        return () if allocation is None else (*allocation.nodes, *allocation.spare)

    @property
    def elsewhere(self) -> bool:
        """Whether it will run on other machines than the probed one: a login node may have other
        limits, interfaces and GPUs."""
        return self.plan is not None and self.allocation is None


@dataclass(frozen=True)
class _Folders:
    """Facts about the run's directory and data, known before the nodes are probed; `vocab_size` is
    the model's, None if unknown."""

    state: RunState
    disk: Disk
    data: DataSet
    held_out: Mapping[HeldOutFolder, DataSet]
    vocab_size: int | None

    @property
    def data_sets(self) -> list[DataSet]:
        return [each for each in (self.data, *self.held_out.values()) if each.index]


@dataclass(frozen=True)
class _Facts(_Folders):
    survey: Survey
    slurm: SlurmFacts | None
    job: fit.JobFacts


Looking = Callable[[str], AbstractContextManager[None]]
"""Shows what is being examined, for the duration of the block."""


def examine(
    examination: Examination,
    supervisor: Supervisor,
    environ: Mapping[str, str] = os.environ,
    looking: Looking = lambda _: nullcontext(),
) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known, in reading order."""
    yield finding("configuration", passed("it is valid"))
    with looking("looking at the run's directory and its data"):
        folders = _look_at_folders(examination)
    yield finding("run", storage.check_run(folders.state))
    mesh = fit.check_mesh(examination.config, examination.world, folders.vocab_size)
    yield finding("mesh", mesh)
    yield from _about_data(examination, folders, supervisor, looking)
    facts = _ask(examination, folders, environ, looking)
    yield from _about_ranks(examination, facts)
    yield from _about_storage(examination, facts, environ)
    yield from _about_time(examination, facts, supervisor)
    yield from _about_nodes(examination, facts)
    yield finding("Slurm", fit.check_slurm(facts.slurm, examination.uses_slurm))


def _look_at_folders(examination: Examination) -> _Folders:
    config, run = examination.config, examination.run
    checkpoints = Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
    state, disk = look_at_run(run), look_at_disk(checkpoints)
    data = find_data_set("data.dataset_path", config.data.dataset_path)
    held_out = {one: find_data_set(one.key, one.folder) for one in config.eval.due}
    index, vocab_size = data.index, config.model.vocab_size
    if not vocab_size and index is not None:
        vocab_size = index.vocab_size
    return _Folders(state, disk, data, held_out, vocab_size)


def _ask(
    examination: Examination, folders: _Folders, environ: Mapping[str, str], looking: Looking
) -> _Facts:
    wanted, allocation = _wanted(examination, folders, environ), examination.allocation
    who = "this machine" if allocation is None else "the nodes"
    asking: Future[tuple[SlurmFacts | None, fit.JobFacts]] = Future()

    def ask_slurm() -> None:
        try:
            asking.set_result(_ask_slurm(examination))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            asking.set_exception(error)

    # Not a pool: Python joins a pool's threads at exit, even after a Ctrl-C.
    threading.Thread(target=ask_slurm, name="slurm", daemon=True).start()
    with looking(f"asking {who} about storage, network, GPUs and the import of torch"):
        survey = survey_here(wanted) if allocation is None else survey_nodes(wanted, allocation)
    with looking("waiting for Slurm's answer"):
        asked, job = asking.result()
    return _Facts(**vars(folders), survey=survey, slurm=asked, job=job)


def _wanted(
    examination: Examination, folders: _Folders, environ: Mapping[str, str]
) -> NodeQuestions:
    """What to ask the nodes; without a write test if the run may be running."""
    config = examination.config
    shared = dict.fromkeys((folders.disk.existing, str(nearest(examination.run.path))))
    details = DetailQuestion(
        copies=tuple(each.marker for each in folders.data_sets),
        caches=(_cache(environ),) if offline(environ) else (),
        imports=() if config.model.factory is None else (config.model.factory,),
    )
    write = folders.state.running is False
    return NodeQuestions(tuple(shared), write, config.distributed.interface, details)


def offline(environ: Mapping[str, str]) -> list[str]:
    return [name for name in OFFLINE if environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON")]


def _cache(environ: Mapping[str, str]) -> str:
    """The cache of Hugging Face's libraries: HF_HUB_CACHE, HF_HOME, and so on."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/") / ".cache")
    base = environ.get("HF_HOME") or str(Path(home) / "huggingface")
    return environ.get("HF_HUB_CACHE") or str(Path(base) / "hub")


def _ask_slurm(examination: Examination) -> tuple[SlurmFacts | None, fit.JobFacts]:
    plan, allocation = examination.plan, examination.allocation
    job = fit.JobFacts(None, None) if plan is None else fit.JobFacts(plan.requeue, plan.limit)
    if not there_is_slurm():
        return None, job
    partition = "" if plan is None else plan.partition
    if allocation is not None:
        try:
            state = scontrol.job_state(allocation.job)
        except (SlurmError, ValueError) as error:
            return SlurmFacts(controller=str(error)), job
        partition = state.nodes.partition
        job = fit.JobFacts(state.may_requeue, state.times.limit, state.batch)
    # A run without Slurm does not wait for one that does not answer.
    return look_at_slurm(partition, SHORTLY if examination.uses_slurm else 0.0), job


def _about_ranks(examination: Examination, facts: _Facts) -> Iterator[Finding]:
    config, world = examination.config, examination.world
    answers = () if examination.elsewhere else facts.survey.answers
    yield from fit.check_ranks(world, answers, facts.survey.gpus_hidden)
    if examination.elsewhere:
        return
    yield from fit.check_gpu_memory(config, world, facts.vocab_size, answers)
    yield from nodes.check_gpus(answers, ours=world.in_job, busy=facts.state.running is not False)


def _about_data(
    examination: Examination, folders: _Folders, supervisor: Supervisor, looking: Looking
) -> Iterator[Finding]:
    found = storage.check_data(examination.config, folders.data, folders.held_out)
    yield from found
    if any(each.level is Level.FAIL for each in found):
        yield finding("start", skipped("not tried, since the data cannot be used"))
        return
    try:
        with looking("trying whether kempner supervise would start"):
            supervisor.ready()
    except RunError as error:
        yield finding("start", fail(str(error)))
    else:
        yield finding("start", passed("kempner supervise would start"))


def _about_storage(
    examination: Examination, facts: _Facts, environ: Mapping[str, str]
) -> Iterator[Finding]:
    config, answers = examination.config, facts.survey.answers
    keep = config.checkpoint.keep_last
    yield from storage.check_copies(answers, {e.marker: e.folder for e in facts.data_sets})
    yield from storage.check_shared(facts.survey)
    yield finding("space", storage.check_room(facts.disk, _size(examination, facts), keep))
    able = storage.check_file_system(
        facts.disk.existing, probe_file_system(Path(facts.disk.existing))
    )
    yield finding("file system", able)
    yield finding("inodes", storage.check_inodes(facts.disk, examination.world.size, keep))
    yield from storage.check_caches(
        answers, offline(environ), needed=config.model.factory is not None
    )


def _about_time(
    examination: Examination, facts: _Facts, supervisor: Supervisor
) -> Iterator[Finding]:
    world, answers = examination.world, facts.survey.answers
    save = fit.predict_save(_size(examination, facts), answers, world.nodes, world.in_job)
    yield finding("save time", fit.check_write(answers, save))
    window = fit.check_window(examination.plan, facts.job.limit, save, supervisor.lead)
    yield finding("warning", window)
    if facts.slurm is not None and examination.uses_slurm and not facts.slurm.controller:
        yield finding("preemption", fit.check_grace(facts.slurm, save))
        resubmit = examination.config.slurm.resubmit
        yield finding("requeue", fit.check_requeue(facts.job, examination.plan, resubmit))
        yield finding("partition", fit.check_time(facts.slurm, facts.job.limit))


def _about_nodes(examination: Examination, facts: _Facts) -> Iterator[Finding]:
    config, survey = examination.config, facts.survey
    ahead = None if facts.slurm is None else facts.slurm.ahead
    if len(survey.asked) > 1 or not survey.answers:
        yield nodes.check_answers(survey)
    yield from nodes.check_software(survey.answers)
    if examination.elsewhere:
        yield from nodes.check_clocks(survey, ahead)
        where = "GPUs, interfaces, ports, limits and memory: --allocation in the job looks at them"
        yield finding("nodes", skipped(where))
        return
    yield from nodes.check_interfaces(survey.answers)
    if facts.state.running is False:  # otherwise the run itself may use them
        section = config.supervise
        free = 0 if section.ports is None else sum(map(_is_free, section.ports))
        wanted = None if section.ports is None else section.control_ports
        yield finding("ports", nodes.check_ports(nodes.PortFacts(wanted, free)))
    yield from nodes.check_clocks(survey, ahead)
    workers = config.data.num_dataloader_workers
    yield from nodes.check_limits(survey.answers, examination.world.size, workers)
    size = _size(examination, facts) if config.checkpoint.async_save else None
    yield from nodes.check_memory(survey.answers, (size or 0) / examination.world.nodes)


def _size(examination: Examination, facts: _Facts) -> int | None:
    """The size of a checkpoint by the model's sizes; for a user's own model that of the newest
    one."""
    size = None
    if facts.vocab_size is not None:
        size = checkpoint_bytes(examination.config, facts.vocab_size)
    return facts.disk.newest if size is None else size


def _is_free(port: int) -> bool:
    """Bind the port for a moment, as the supervisor would."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
