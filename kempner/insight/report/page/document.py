"""The page: one HTML file that needs nothing else, and says it all without a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from kempner.insight.report.cause import Kind
from kempner.insight.report.page import tables
from kempner.insight.report.page.plots import Plot, plots_of
from kempner.insight.report.page.strip import strip
from kempner.insight.report.page.words import date, duration, number, share, text
from kempner.insight.report.summary import RunData, RunReport
from kempner.run.output.units import count

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing that is not in it."""

_DEFINITIONS = """
<p><b>Goodput</b> is the effective training time ratio: the time of steps that count, by the whole
wall time from the first start to the end, queue and pauses included
(<a href="https://arxiv.org/abs/2410.21680">Kokolis et al., arXiv:2410.21680</a>). <b>Without queue
and pauses</b> it is of the time in which machines were held, like Google's runtime goodput (<a href="https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity">ML
productivity goodput</a>).</p>
<p>Of a step that was made twice, one counts as training and the other as made again. Each part of
the time is counted from its own records, the ledger and the metrics of the run; what they do not
explain is shown as unaccounted. A rank counts as one GPU: time on all ranks is the time in which
machines were held, by the number of ranks, so that an interruption's time away costs none of it.
Plots show the lowest and the highest value of each stretch. Young's formula: the interval is
sqrt(2 · cost of a save · time between failures)
(<a href="https://doi.org/10.1145/361147.361115">Young 1974</a>).</p>
"""


def page(runs: Sequence[RunData], version: str) -> str:
    """The report of one run, or of several side by side, by this version of kempner."""
    title = ", ".join(run.report.name for run in runs)
    several, plots = len(runs) > 1, plots_of(runs)
    body = [_header(runs)]
    if several:
        body += [_section("Side by side", tables.comparison([run.report for run in runs]))]
        body += [_section("Training", _plots(plots))]
    body += [_run(run, None if several else plots) for run in runs]
    body.append(
        f"<footer><h2>How this is counted</h2>{_DEFINITIONS}"
        f"<p>Made by kempner {text(version)}.</p></footer>"
    )
    data = json.dumps(plots, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{text(title)}: kempner report</title>"
        f"<style>{_asset('uplot.css')}{_asset('report.css')}</style></head>"
        f"<body><main>{''.join(body)}</main>"
        f'<script type="application/json" id="plots">{data}</script>'
        f"<script>/* uPlot, MIT license:\n{_asset('uplot-LICENSE.txt')}*/\n{_asset('uplot.js')}"
        f"</script><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("kempner.insight.report.page") / "assets" / name).read_text(encoding="utf-8")


def _header(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        names = ", ".join(text(run.report.name) for run in runs)
        return f"<header><p class=kicker>kempner report</p><h1>{names}</h1></header>"
    report = runs[0].report
    return (
        f"<header><p class=kicker>kempner report · {date(report.time.begin)} to "
        f"{date(report.time.end)}</p>"
        f"<h1>{text(report.name)}</h1><p class=lead>{story(report)}</p></header>"
    )


def story(report: RunReport) -> str:
    """What happened, in a few sentences of HTML."""
    total = "" if report.training.total_steps is None else f" of {report.training.total_steps:,}"
    who = count(report.time.machines.ranks, "rank")
    if report.time.machines.nodes is not None:
        who += f" ({count(report.time.machines.nodes, 'node')})"
    unit = tables.unit_of(report)
    state = text(report.training.state[:1].upper() + report.training.state[1:])
    told = [
        f"{state} after {duration(report.time.wall)} on {who}: "
        f"step {report.training.step:,}{total}.",
        _trained(report),
    ]
    many = len(report.interruptions)
    if many:
        kinds = [one.kind for one in report.interruptions]
        words = (
            (Kind.FAILURE, "failure", "failures"),
            (Kind.HANG, Kind.HANG.value, "hangs"),
            (Kind.STOP, "stop", "stops"),
            (Kind.SILENT, "end without a message", "ends without a message"),
        )
        listed = ", ".join(
            count(kinds.count(kind), one, more) for kind, one, more in words if kind in kinds
        )
        told.append(
            f"{count(many, 'interruption')} ({listed}) cost {unit.show(report.lost_hours)} "
            f"{unit.name}."
        )
    else:
        told.append("Nothing interrupted it.")
    return " ".join(told)


def _trained(report: RunReport) -> str:
    if report.time.goodput is None:
        return "How much of the wall time trained is not known: its program does not say."
    return f"<b>{share(report.time.goodput)}</b> of the wall time trained."


def _run(run: RunData, plots: Sequence[Plot] | None) -> str:
    """What there is to say of one run, with its `plots` if it is the only one."""
    report = run.report
    head = ""
    if plots is None:
        head = f"<h1>{text(report.name)}</h1><p class=lead>{story(report)}</p>"
    used = f" <small>of {count(report.nodes.used, 'node')}</small>" if report.nodes.used else ""
    parts = [
        head,
        _figures(report),
        _section(
            "Where the time went",
            strip(run.timeline, report.interruptions) + tables.time_table(report),
        ),
        _section("Interruptions", tables.interruption_table(report)),
        "" if plots is None else _section("Training", _plots(plots)),
        _section("Checkpoints", tables.save_table(report)),
        _section(f"Nodes{used}", tables.node_table(report)),
        _section("Advice", tables.advice_list(report)),
    ]
    return f"<article>{''.join(parts)}</article>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _figures(report: RunReport) -> str:
    """The numbers that one looks for first."""
    total = sum(report.time.gpu_hours.values())
    lost = report.lost_hours / total if total else None
    unit = tables.unit_of(report)
    figures = [
        (
            share(report.time.goodput),
            "goodput",
            f"{share(report.time.while_held)} without queue and pauses",
        ),
        (duration(report.time.wall), "wall time", count(report.training.attempts, "attempt")),
        (unit.show(total), unit.name, f"{share(lost)} lost to interruptions"),
        (
            f"{len(report.interruptions):,}",
            "interruption" if len(report.interruptions) == 1 else "interruptions",
            f"{unit.show(report.lost_hours)} {unit.name} lost",
        ),
        (
            number(report.training.last_loss, ".3f"),
            "last loss",
            f"held out {number(report.training.last_eval_loss, '.3f')}",
        ),
    ]
    cells = (
        f"<div><strong>{value}</strong><span>{name}</span><small>{more}</small></div>"
        for value, name, more in figures
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def _plots(plots: Sequence[Plot]) -> str:
    """Places for the plots; without a script they stay empty."""
    places = "".join(
        f'<figure data-plot="{n}"><figcaption>{plot["title"]} <small>{plot["unit"]}</small>'
        f"</figcaption><div></div></figure>"
        for n, plot in enumerate(plots)
    )
    if not places:
        return "<p>This run has logged no steps.</p>"
    return f"{places}<noscript><p>The plots need JavaScript; all else is here.</p></noscript>"
