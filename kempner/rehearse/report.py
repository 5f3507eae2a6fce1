"""The report of a rehearsal: one table, and what to do."""

from __future__ import annotations

from pathlib import Path

from kempner.rehearse.judge import Findings, Row, Verdict, judge, shown
from kempner.rehearse.rehearsal import Seen
from kempner.rehearse.words import explain
from kempner.run.output.units import count
from kempner.run.process.exit_codes import ExitCode

COLUMNS = ("samples", "losses", "rate", "evaluation", "weights", "names", "generators", "variables")
MOST_FILES = 12


def report(seen: Seen, size: int) -> tuple[str, ExitCode]:
    """All lines, and the exit code that goes with them."""
    findings = judge(seen)
    lines = [*_table(findings.rows), ""]
    lines += [f"- {sentence}" for sentence in explain(seen, findings)]
    lines += _outside(seen)
    if findings.told_only:
        names = ", ".join(f"`{name}`" for name in sorted(set(findings.told_only))[:MOST_FILES])
        lines.append(f"begins anew, and only tells people something: {names}")
    lines.append(_verdict(seen, findings, size))
    code = ExitCode.COMPLETED if findings.verdict is Verdict.EXACT else ExitCode.CRASHED
    return "\n".join(lines).strip("\n"), code


def _verdict(seen: Seen, findings: Findings, size: int) -> str:
    ranks = count(size, "rank")
    over = f"{seen.undisturbed.last} steps on {ranks}"
    match findings.verdict:
        case Verdict.EXACT:
            return f"exact: {over}, stopped and killed {len(seen.disturbances)} times"
        case Verdict.DIFFERS:
            return f"not exact, over {over}"
        case Verdict.BY_ITSELF:
            return f"not repeatable, over {over}"
        case Verdict.FAILED:
            return "not rehearsed to the end"


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    width = max(len(row.words) for row in rows)
    head = " ".join([" " * width, *COLUMNS])
    lines = [head.rstrip()]
    for row in rows:
        cells = [_cell(row, name).ljust(len(name)) for name in COLUMNS]
        lines.append(" ".join([row.words.ljust(width), *cells]).rstrip())
    return lines


def _cell(row: Row, name: str) -> str:
    same = row.fields.get(name)
    return "-" if same is None else "exact" if same else "DIFFER"


def _outside(seen: Seen) -> list[str]:
    """What the program did elsewhere."""
    starts = [seen.undisturbed, *seen.starts]
    records = [record for start in starts for record in start.records]
    wrote = sorted({path for r in records for path in r.wrote if Path(path).exists()})
    called = sorted({host for record in records for host in record.called})
    lines = []
    if wrote:
        names = ", ".join(shown(path) for path in wrote[:MOST_FILES])
        more = f" and {len(wrote) - MOST_FILES} more" if len(wrote) > MOST_FILES else ""
        lines.append(f"written outside of the run: {names}{more}")
    if called:
        lines.append(f"connected to: {', '.join(called[:MOST_FILES])}")
    return lines
