"""What a batch script requests, and what Slurm reports of the job and its partition."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SHORTLY, SlurmError
from kempner.cluster.slurm.directives import read_pairs, read_words
from kempner.cluster.slurm.resources import count_gpus

_CONFIGURATION = Path("/etc/slurm/slurm.conf")


_TORCHRUN = re.compile(r"^[^#]*--launcher[= ]torchrun\b", re.MULTILINE)
"""In the script's line that starts the supervisor."""

DEFAULT_WARNING = 60.0  # seconds before the end at which `--signal` without a time comes: sbatch(1)


@dataclass(frozen=True)
class EarlySignal:
    """A `--signal`: its name, the seconds before the end, and whether the batch script gets it."""

    signal: str
    seconds: float
    to_script: bool


@dataclass(frozen=True)
class RequestedNodes:
    """The nodes of a job, and tasks and GPUs on each; None where its script does not say. With
    `torchrun` one task starts the ranks of a node, and is not a rank itself."""

    count: int | None = None
    tasks: int | None = None
    gpus: int | None = None
    torchrun: bool = False

    @property
    def ranks(self) -> int | None:
        return self.gpus if self.torchrun or self.tasks is None else self.tasks


@dataclass(frozen=True)
class JobPlan:
    """What a job requests; None where its script does not say. `limit` is in seconds.

    `source` names the script. `requeue` is None where the cluster's JobRequeue decides.
    """

    source: str
    nodes: RequestedNodes = RequestedNodes()
    limit: float | None = None
    warning: EarlySignal | None = None
    requeue: bool | None = None
    partition: str = ""


def read_plan(script: Path, more: Sequence[str] = ()) -> JobPlan:
    """The plan of a batch script; `more` are command-line options, which take precedence.

    Raises `OSError`, and `ValueError` with a sentence.
    """
    return parse_plan(script.read_text(errors="replace"), str(script), more)


def parse_plan(text: str, source: str, more: Sequence[str] = ()) -> JobPlan:
    """As `read_plan`, for a script's text."""
    try:
        asked = list(read_pairs([*read_words(text), *more]))
        options = dict(asked)
        requeue = [name == "requeue" for name, _ in asked if name in ("requeue", "no-requeue")]
        nodes = int(options["nodes"].partition("-")[0]) if "nodes" in options else None
        tasks = int(options["ntasks-per-node"]) if "ntasks-per-node" in options else None
        if tasks is None and nodes and "ntasks" in options:
            tasks = int(options["ntasks"]) // nodes
        gres = options.get("gres", "")
        gpus = options.get("gpus-per-node", gres if "gpu" in gres else None)
        return JobPlan(
            source=source,
            nodes=RequestedNodes(
                nodes,
                tasks,
                None if gpus is None else count_gpus(gpus),
                _TORCHRUN.search(text) is not None,
            ),
            limit=parse_limit(options["time"]) if "time" in options else None,
            warning=parse_signal(options["signal"]) if "signal" in options else None,
            requeue=requeue[-1] if requeue else None,
            partition=options.get("partition", ""),
        )
    except ValueError as error:
        raise ValueError(f"{source} cannot be understood: {error}") from error


def parse_signal(text: str) -> EarlySignal:
    """`B:SIGTERM@120`, `USR1@60`, `R:10`: sbatch(1). Raises `ValueError`."""
    found = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--signal={text} is no signal")
    seconds = DEFAULT_WARNING if found[3] is None else float(found[3])
    return EarlySignal(found[2].upper(), seconds, to_script="B" in (found[1] or "").upper())


def parse_limit(text: str) -> float | None:
    """Seconds of a time limit in any form of sbatch(1); None for no limit.

    Raises `ValueError`.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"--time={text} is no time limit")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    assert first is not None
    if days is not None:  # days-hours[:minutes[:seconds]]
        return float(((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0))
    if third is not None:  # hours:minutes:seconds
        return float((first * 60 + (second or 0)) * 60 + third)
    return float(first * 60 + (second or 0))  # minutes[:seconds]


@dataclass(frozen=True)
class Partition:
    """A partition. `grace` and `longest` are in seconds; None if its jobs are never preempted, and
    without a limit."""

    name: str
    grace: float | None
    longest: float | None
    up: bool = True


@dataclass(frozen=True)
class SlurmFacts:
    """`controller` and `accounting` say why they do not answer; empty if they do. `ahead` is by how
    many seconds the controller's clock is ahead of ours, None if unknown. `partition` is None if
    unknown, for the reason in `no_partition`."""

    controller: str = ""
    accounting: str = ""
    ahead: float | None = None
    kill_wait: float = 30.0
    partition: Partition | None = None
    no_partition: str = ""


def there_is_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this host has Slurm's commands, and a configuration for them: a laptop with only the
    package has neither a file nor a server for that."""
    if shutil.which("scontrol") is None:
        return False
    if environ.get("SLURM_CONF") or _CONFIGURATION.exists():
        return True
    try:
        scontrol.cluster_settings(within=0.0)
    except SlurmError as error:
        return "configuration source" not in str(error)
    return True


def look_at_slurm(partition: str, within: float = SHORTLY) -> SlurmFacts:
    """Ask the controller and the accounting, and about a partition unless `partition` is empty.
    Each question is repeated for `within` seconds until there is an answer."""
    try:
        settings = scontrol.cluster_settings(within)
    except SlurmError as error:
        return SlurmFacts(controller=_short(error))
    ahead = None if settings.ahead is None else settings.ahead + time.monotonic() - time.time()
    try:
        scontrol.accounting_answers(within)
        accounting = ""
    except SlurmError as error:
        accounting = _short(error)
    found, why = None, ""
    if partition:
        try:
            found = read_partition(scontrol.show_partition(partition.partition(",")[0], within))
        except (SlurmError, ValueError) as error:
            why = _short(error)
    return SlurmFacts("", accounting, ahead, settings.kill_wait, found, why)


def _short(error: Exception) -> str:
    """The command, and its last complaint."""
    command, colon, complaint = str(error).partition(": ")
    return f"{command}{colon}{complaint.rpartition('; ')[2]}"


def read_partition(fields: Mapping[str, str]) -> Partition:
    """Parse the fields of `scontrol show partition`. Raises `ValueError` with a sentence."""
    return Partition(
        name=fields["PartitionName"],
        grace=scontrol.preemption_grace(fields),
        longest=parse_limit(fields.get("MaxTime", "UNLIMITED")),
        up=fields.get("State", "UP") == "UP",
    )


def job_plan(job: str) -> JobPlan | None:
    """The plan of a running job, by its script and, if there is accounting, its command line. None
    if it has no script, as under `salloc`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        try:
            scontrol.write_script(job, script, within=SHORTLY)
        except SlurmError:
            return None
        try:
            words = shlex.split(scontrol.submit_line(job, within=3.0))
        except (SlurmError, ValueError):
            words = []
        try:
            plan = read_plan(script, _options(words))
        except (OSError, ValueError):
            return None
    return replace(plan, source=f"the script of job {job}")


def _options(words: list[str]) -> list[str]:
    """The options of an `sbatch` command line, which end at the script."""
    end, takes_value = 1, False
    for word in words[1:]:
        if not (takes_value or word.startswith("-")):
            break
        takes_value = not takes_value and bool(re.fullmatch(r"-\w", word))
        end += 1
    return words[1:end]
