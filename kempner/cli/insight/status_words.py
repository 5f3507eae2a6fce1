"""The status of a run in words: names and values, and one line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kempner.insight.report.page.words import duration
from kempner.insight.status.activity import Activity
from kempner.insight.status.facts import CheckpointFacts
from kempner.insight.status.job import JobStatus
from kempner.insight.status.summary import AttemptStatus, EndOfAttempt, RunProgress, Status
from kempner.run.output.units import count, name_or_count

UNKNOWN = "-"

SHOWN_GROUPS = 8
"""Places of ranks that are shown."""

_DAY = 86400.0


def rows(name: str, status: Status) -> Iterator[tuple[str, str]]:
    """All that is to be shown of a run, by name; a name may come again."""
    yield "run", name or "none yet"
    if status.job is not None:
        yield from job_rows(status.job)
    yield "state", status.state
    yield from facts(status)
    for end in status.ends:
        yield "interrupted", f"{moment(end.time, status.now)}: {describe_end(end)}"
    yield from places(status)
    for sentence in status.facts.unread:
        yield "problem", sentence


def facts(status: Status) -> Iterator[tuple[str, str]]:
    """Progress, speed, ends, and what holds the run up."""
    progress, activity = status.progress, status.doing.activity
    yield "step", step(progress)
    yield "loss", loss(progress)
    if activity.is_live:
        yield "speed", speed(progress)
    if status.outlook.done_at is not None:
        yield "time left", time_left(status, status.outlook.done_at)
    if (allocation := allocation_left(status)) is not None:
        yield "allocation", allocation
    if status.outlook.deadline is not None and not _is_end_of_job(status):
        yield "next deadline", deadline(status)
    yield "latest checkpoint", checkpoint(status.facts.checkpoint, status.now)
    yield "attempt", attempt(status.attempt, status.now)
    if status.ranks.waits_for not in ("", status.doing.reason):
        yield "waits for", status.ranks.waits_for
    if activity.is_live:
        slow = status.ranks.slowest
        yield "slowest rank", "none stands out" if slow is None else slow.sentence


def _is_end_of_job(status: Status) -> bool:
    """Whether the row "allocation" tells of the next deadline."""
    job, next_ = status.job, status.outlook.deadline
    return job is not None and next_ is not None and job.ends_at == next_.time and not job.preempted


def places(status: Status) -> Iterator[tuple[str, str]]:
    """Where the ranks are: the largest groups."""
    groups = sorted(status.ranks.groups, key=lambda group: -len(group.ranks))[:SHOWN_GROUPS]
    for group in sorted(groups, key=lambda group: (group.step, group.ranks)):
        name = name_or_count(group.ranks)
        yield (name, group.place) if len(name) <= 18 else ("ranks", f"{name}: {group.place}")
    if rest := len(status.ranks.groups) - len(groups):
        yield "", f"and {count(rest, 'other place')}"


def job_rows(job: JobStatus) -> Iterator[tuple[str, str]]:
    """The rows on the Slurm job."""
    yield "job", describe_job(job)
    if not (job.restarts.accounting is None and job.agrees):
        yield "restarts", f"{job.restarts}{'' if job.agrees else ': THEY DISAGREE'}"


def describe_job(job: JobStatus) -> str:
    """Its id, state and nodes, as Slurm spells them."""
    return f"{job.job} {job.state} {job.nodes}".rstrip()


def step(progress: RunProgress) -> str:
    """`79 of 120`."""
    total = "" if progress.total is None else f" of {progress.total}"
    return UNKNOWN if progress.step is None else f"{progress.step}{total}"


def loss(progress: RunProgress) -> str:
    """The last one, and the last one on held-out data."""
    said = _known(progress.loss, "{:.4f}")
    held_out = progress.eval_loss
    return said if held_out is None else f"{said}, held-out {held_out:.4f}"


def speed(progress: RunProgress) -> str:
    """Tokens a second of all ranks, and what else is known."""
    said = [_known(progress.pace.tokens_per_second, "{:,.0f} tokens/s")]
    if progress.pace.mfu is not None:
        said.append(f"MFU {progress.pace.mfu:.1%}")
    if progress.pace.seconds_per_step is not None:
        said.append(f"{duration(progress.pace.seconds_per_step)} a step")
    for what, part in progress.pace.waited.items():
        if part >= _WORTH_TELLING:
            said.append(f"{part:.0%} waiting for {_WAITED.get(what, what)}")
    return ", ".join(said)


_WORTH_TELLING = 0.05
"""Share of the time of steps that goes into waiting, from which on it is told."""

_WAITED = {"others": "other ranks"}


def time_left(status: Status, done_at: float) -> str:
    """The time until the last step."""
    left = max(0.0, done_at - status.now)
    return f"{duration(round(left))}, done {moment(done_at, status.now)}"


def allocation_left(status: Status) -> str | None:
    """When the job ends, against the end of the run; None where there is no such end."""
    ends_at = None if status.job is None else status.job.ends_at
    if ends_at is None:
        return None
    left = duration(round(max(0.0, ends_at - status.now)))
    if status.outlook.done_at is None:
        return f"ends in {left}"
    apart = duration(round(abs(ends_at - status.outlook.done_at)))
    if status.outlook.fits:
        return f"ends in {left}, {apart} after the run is done"
    return f"ends in {left}, {apart} before the run is done"


def deadline(status: Status) -> str:
    """What happens next, and when."""
    if status.outlook.deadline is None:
        return UNKNOWN
    left = status.outlook.deadline.time - status.now
    when = f"in {duration(round(left))}" if left > 0 else f"{duration(round(-left))} ago"
    return f"{when}: {status.outlook.deadline.what}"


def checkpoint(found: CheckpointFacts | None, now: float) -> str:
    """Step, age, and whether it was checked."""
    if found is None:
        return UNKNOWN
    said = [str(found.step)]
    if found.time is not None:
        said.append(f"{duration(round(max(0.0, now - found.time)))} ago")
    if found.damaged:
        said.append(f"{count(found.damaged, 'file')} DAMAGED")
    elif found.verified_at is not None:
        said.append(f"verified {duration(round(max(0.0, now - found.verified_at)))} ago")
    elif found.loaded:
        said.append("checked as the run went on from it")
    return ", ".join(said)


def attempt(last: AttemptStatus | None, now: float) -> str:
    """The number of the attempt, its ranks, and since when."""
    if last is None:
        return UNKNOWN
    where = f" on {last.nodes}" if last.nodes else f" on {last.device}" if last.device else ""
    return f"{last.number}, {count(last.ranks, 'rank')}{where}, began {moment(last.begin, now)}"


def describe_end(end: EndOfAttempt) -> str:
    """Which attempt was interrupted, and why."""
    node = f" ({end.node})" if end.node else ""
    return f"attempt {end.attempt}, {end.cause}{node}"


def moment(time: float, now: float) -> str:
    """A time of day here, with its date if that is not today's."""
    there, today = datetime.fromtimestamp(time), datetime.fromtimestamp(now)
    if there.date() == today.date():
        return f"{there:%H:%M:%S}" if abs(now - time) < 3600 else f"{there:%H:%M}"
    return f"{there:%a %H:%M}" if abs(now - time) < 6 * _DAY else f"{there:%Y-%m-%d %H:%M}"


def line(name: str, status: Status) -> str:
    """A run in one line."""
    return "  ".join(part for part in (f"{name}:", *cells(status)) if part != UNKNOWN)


def cells(status: Status) -> tuple[str, ...]:
    """State, step, loss, speed, time left and attempt, each as short as can be."""
    progress, live = status.progress, status.doing.activity.is_live
    left = None if status.outlook.done_at is None else max(0.0, status.outlook.done_at - status.now)
    return (
        short_state(status),
        UNKNOWN if progress.step is None else f"step {step(progress).replace(' of ', '/')}",
        UNKNOWN if progress.loss is None else f"loss {progress.loss:.4f}",
        _known(progress.pace.tokens_per_second if live else None, "{:,.0f} tokens/s"),
        UNKNOWN if left is None else f"{duration(round(left))} left",
        UNKNOWN if status.attempt is None else f"attempt {status.attempt.number}",
    )


def short_state(status: Status) -> str:
    """The activity; with its reason where a person may want to act."""
    activity, reason = status.doing
    if status.facts.unread and activity is Activity.NOT_STARTED:
        return status.facts.unread[0]
    return f"{activity} ({reason})" if activity in _TELLS and reason else str(activity)


_TELLS = (
    Activity.TRAINING,
    Activity.STOPPED,
    Activity.QUEUED,
    Activity.FAILED,
    Activity.GIVEN_UP,
)


def _known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
