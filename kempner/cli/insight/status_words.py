"""The status of a run as text: rows of names and values, and one line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kempner.insight.report.page.words import duration
from kempner.insight.run_reader import CheckpointFacts
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobStatus
from kempner.insight.status.summary import AttemptStatus, EndOfAttempt, RunProgress, Status
from kempner.run.output.units import count, name_or_count

UNKNOWN = "-"

SHOWN_GROUPS = 8  # most groups of ranks shown

_DAY = 86400.0


def rows(name: str, status: Status) -> Iterator[tuple[str, str]]:
    """Name and value of each row; names may repeat."""
    yield "run", name or "none yet"
    if status.job is not None:
        yield from job_rows(status.job)
    yield "state", status.state
    yield from facts(status)
    for end in status.ends:
        yield "interrupted", f"{moment(end.time, status.now)}: {describe_end(end)}"
    for name, place in places(status):
        yield (name, place) if len(name) <= 18 else ("ranks", f"{name}: {place}")
    for sentence in status.facts.unread:
        yield "problem", sentence


def facts(status: Status) -> Iterator[tuple[str, str]]:
    progress, activity = status.progress, status.doing.activity
    yield "step", step(progress)
    yield "loss", loss(progress)
    if activity.is_live:
        yield "speed", speed(progress)
    if (done_at := status.outlook.done_at) is not None:
        until = duration(round(max(0.0, done_at - status.now)))
        yield "time left", f"{until}, done {moment(done_at, status.now)}"
    if (allocation := allocation_left(status)) is not None:
        yield "allocation", allocation
    deadline, job = status.outlook.deadline, status.job
    end_of_job = None if job is None or job.preempted else job.ends_at  # shown as "allocation"
    if deadline is not None and deadline.time != end_of_job:
        left = deadline.time - status.now
        when = f"in {duration(round(left))}" if left > 0 else f"{duration(round(-left))} ago"
        yield "next deadline", f"{when}: {deadline.what}"
    yield "latest checkpoint", checkpoint(status.facts.checkpoint, status.now)
    yield "attempt", attempt(status.attempt, status.now)
    if status.ranks.waits_for not in ("", status.doing.reason):
        yield "waits for", status.ranks.waits_for
    if activity.is_live:
        slow = status.ranks.slowest
        yield "slowest rank", "none stands out" if slow is None else slow.sentence


def places(status: Status) -> Iterator[tuple[str, str]]:
    groups = sorted(status.ranks.groups, key=lambda group: -len(group.ranks))[:SHOWN_GROUPS]
    for group in sorted(groups, key=lambda group: (group.step, group.ranks)):
        yield name_or_count(group.ranks), group.place
    if rest := len(status.ranks.groups) - len(groups):
        yield "", f"and {count(rest, 'other place')}"


def job_rows(job: JobStatus) -> Iterator[tuple[str, str]]:
    yield "job", f"{job.job} {job.state} {job.nodes}".rstrip()
    if not (job.restarts.accounting is None and job.agrees):
        yield "restarts", f"{job.restarts}{'' if job.agrees else ': THEY DISAGREE'}"


def step(progress: RunProgress) -> str:
    """`79 of 120`."""
    total = "" if progress.total is None else f" of {progress.total}"
    return UNKNOWN if progress.step is None else f"{progress.step}{total}"


def loss(progress: RunProgress) -> str:
    train_loss = _known(progress.loss, "{:.4f}")
    losses = {"held-out": progress.eval_loss}
    losses |= {name: found.get("loss") for name, found in progress.eval_sets.items()}
    held_out = [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
    accuracy = [] if progress.accuracy is None else [f"accuracy {progress.accuracy:.0%}"]
    return ", ".join([train_loss, *accuracy, *held_out])


def speed(progress: RunProgress) -> str:
    figures = [_known(progress.pace.tokens_per_second, "{:,.0f} tokens/s")]
    if progress.pace.mfu is not None:
        figures.append(f"MFU {progress.pace.mfu:.1%}")
    if progress.pace.seconds_per_step is not None:
        figures.append(f"{duration(progress.pace.seconds_per_step)} a step")
    for what, part in progress.pace.waited.items():
        if part >= _WORTH_TELLING:
            figures.append(f"{part:.0%} waiting for {_WAITED.get(what, what)}")
    return ", ".join(figures)


_WORTH_TELLING = 0.05  # share of time spent waiting above which it is shown

_WAITED = {"others": "other ranks"}


def allocation_left(status: Status) -> str | None:
    """The time until the job ends, compared with the end of the run; None if unknown."""
    ends_at = None if status.job is None else status.job.ends_at
    if ends_at is None:
        return None
    left = duration(round(max(0.0, ends_at - status.now)))
    if status.outlook.done_at is None:
        return f"ends in {left}"
    apart = duration(round(abs(ends_at - status.outlook.done_at)))
    return f"ends in {left}, {apart} {'after' if status.outlook.fits else 'before'} the run is done"


def checkpoint(found: CheckpointFacts | None, now: float) -> str:
    if found is None:
        return UNKNOWN
    details = [str(found.step)]
    if found.time is not None:
        details.append(f"{duration(round(max(0.0, now - found.time)))} ago")
    if found.damaged:
        details.append(f"{count(found.damaged, 'file')} DAMAGED")
    elif found.verified_at is not None:
        details.append(f"verified {duration(round(max(0.0, now - found.verified_at)))} ago")
    elif found.loaded:
        details.append("checked as the run went on from it")
    return ", ".join(details)


def attempt(last: AttemptStatus | None, now: float) -> str:
    if last is None:
        return UNKNOWN
    where = f" on {last.nodes}" if last.nodes else f" on {last.device}" if last.device else ""
    return f"{last.number}, {count(last.ranks, 'rank')}{where}, began {moment(last.begin, now)}"


def describe_end(end: EndOfAttempt) -> str:
    node = f" ({end.node})" if end.node else ""
    return f"attempt {end.attempt}, {end.cause}{node}"


def moment(time: float, now: float) -> str:
    """A local time of day, with its date if that is not today."""
    there, today = datetime.fromtimestamp(time), datetime.fromtimestamp(now)
    if there.date() == today.date():
        return f"{there:%H:%M:%S}" if abs(now - time) < 3600 else f"{there:%H:%M}"
    return f"{there:%a %H:%M}" if abs(now - time) < 6 * _DAY else f"{there:%Y-%m-%d %H:%M}"


def numbers(status: Status) -> dict[str, str | None]:
    """Short values by the head of their column; None where unknown."""
    progress, done_at = status.progress, status.outlook.done_at
    rate = progress.pace.tokens_per_second if status.doing.activity.is_live else None
    return {
        "step": None if progress.step is None else step(progress).replace(" of ", "/"),
        "loss": None if progress.loss is None else f"{progress.loss:.4f}",
        "tokens/s": None if rate is None else f"{rate:,.0f}",
        "left": None if done_at is None else duration(round(max(0.0, done_at - status.now))),
        "attempt": None if status.attempt is None else str(status.attempt.number),
        "job": None if status.job is None else status.job.job,
    }


_IN_LINE = {
    "step": "step {}",
    "loss": "loss {}",
    "tokens/s": "{} tokens/s",
    "left": "{} left",
    "attempt": "attempt {}",
}


def line(name: str, status: Status) -> str:
    found = numbers(status)
    parts = (form.format(found[key]) for key, form in _IN_LINE.items() if found[key] is not None)
    return "  ".join([f"{name}:", short_state(status), *parts])


def short_state(status: Status) -> str:
    activity, reason = status.doing
    if status.facts.unread and activity is Activity.NOT_STARTED:
        return status.facts.unread[0]
    return f"{activity} ({reason})" if activity in _TELLS and reason else str(activity)


_TELLS = {"training", "stopped", "queued", "failed", "given up"}


def _known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
