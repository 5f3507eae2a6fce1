"""What Slurm says: whether it answers, and of the job and its partition."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SHORTLY, SlurmError
from kempner.cluster.slurm.job import JobState
from kempner.insight.doctor.facts.plan import JobPlan, parse_limit, read_plan

_CONFIGURATION = Path("/etc/slurm/slurm.conf")


@dataclass(frozen=True)
class Partition:
    """`grace` and `longest` are in seconds: `grace` None if its jobs give way to no others,
    `longest` without a limit."""

    name: str
    grace: float | None
    longest: float | None
    up: bool = True


@dataclass(frozen=True)
class SlurmFacts:
    """`controller` and `accounting` say why they do not answer, empty if they do; `ahead` is by how
    many seconds the controller's clock is ahead of ours, None if not known.

    `partition` is None where there is none to look at, with the reason in `no_partition`.
    """

    controller: str = ""
    accounting: str = ""
    ahead: float | None = None
    kill_wait: float = 30.0
    partition: Partition | None = None
    no_partition: str = ""


def there_is_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this host has Slurm's commands, and belongs to a cluster: a laptop with the package
    alone has neither a file nor a server that configures them."""
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
    """Ask the controller, the accounting, and about a partition; empty for the default one.

    Each is asked again for `within` seconds while it gives no answer.
    """
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
    """The command, and the last of what it complains about."""
    command, colon, said = str(error).partition(": ")
    return f"{command}{colon}{said.rpartition('; ')[2]}"


def read_partition(fields: Mapping[str, str]) -> Partition:
    """What `scontrol show partition` shows. Raises `ValueError` with a sentence."""
    return Partition(
        name=fields["PartitionName"],
        grace=scontrol.preemption_grace(fields),
        longest=parse_limit(fields.get("MaxTime", "UNLIMITED")),
        up=fields.get("State", "UP") == "UP",
    )


def read_job(job: str) -> JobState:
    """Raises `SlurmError`."""
    return scontrol.job_state(job)


def job_plan(job: str) -> JobPlan | None:
    """What a running job was submitted with: its script, and the command line where accounts are
    kept. None where it has no script, as under `salloc`."""
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
    found: list[str] = []
    takes_value = False
    for word in words[1:]:
        if takes_value:
            found.append(word)
            takes_value = False
        elif word.startswith("-"):
            found.append(word)
            takes_value = bool(re.fullmatch(r"-\w", word))
        else:
            break
    return found
