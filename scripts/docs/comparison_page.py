"""Makes README's table of other tools, and docs/comparison.md, from what the script has recorded.

python scripts/docs/comparison_page.py

`docs/peers.jsonl` is the record of `benchmarks/peers/run.py`; `docs/peers.toml` has what cannot be
run here, in the words of its own sources, and the evidence of each line that speaks of a peer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
import records  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers" / "peers.toml"
RECORD, SOURCES = ROOT / "docs" / "peers.jsonl", ROOT / "docs" / "peers.toml"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "comparison.md"
BEGIN = "<!-- Made by scripts/docs/comparison_page.py: {}. -->\n"
END = "<!-- The end of it. -->\n"

STOPS = ("epoch", "save", "evaluation", "random", "workers", "apart")
OTHERS = ("kill", "world", "hang")
SAID = {
    "epoch": "stop at the end of an epoch",
    "save": "at a save",
    "evaluation": "within an evaluation",
    "random": "at random",
    "workers": "every process",
    "apart": "ranks apart",
    "kill": "SIGKILL",
    "world": "2 ranks, then 1",
    "hang": "a rank stands still",
}

UNDER_KEMPNER = {
    "transformers Trainer": "kempner, transformers Trainer",
    "Lightning Trainer": "kempner, Lightning Trainer",
    "Accelerate": "kempner, Accelerate",
    "Accelerate, seedable sampler": "kempner, Accelerate",
    "torchtitan": "kempner, torchtitan",
    "torchrun": "kempner, plain loop",
}
"""Each of those for which there is the same program under kempner."""

Row = Mapping[str, Any]
Record = Mapping[str, Mapping[str, Row]]
"""By peer and scenario."""


def main() -> int:
    record, sources = read(), tomli.loads(SOURCES.read_text())
    for page in (README, PAGE):
        page.write_text(made(page.read_text(), record, sources))
    return 0


def read() -> Record:
    """In the order of peers.toml."""
    peers = [peer["name"] for peer in tomli.loads(PEERS.read_text())["peer"]]
    record: dict[str, dict[str, Row]] = {peer: {} for peer in peers}
    for row in records.read(RECORD):
        record[row["peer"]][row["scenario"]] = row
    return {peer: rows for peer, rows in record.items() if rows}


def made(text: str, record: Record, sources: Mapping[str, Any]) -> str:
    """The page with each of its parts made anew."""
    parts = {
        "readme": readme(record),
        "summary": summary(record),
        "scenarios": scenarios(record),
        "not run": not_run(record),
        "better": better(record, sources),
        "sourced": sourced(sources),
        "conditions": conditions(record),
    }
    for name, part in parts.items():
        begin = BEGIN.format(name)
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + part + END + rest.split(END, 1)[1]
    return text


def ran(record: Record) -> list[str]:
    """The peers that trained to the end at least once."""
    return [peer for peer, rows in record.items() if any(row["complete"] for row in rows.values())]


def summary(record: Record) -> str:
    """A line a peer: the worst of its stops, a kill, another number of ranks."""
    lines = [
        "| | stops | steps made again | ended by the scheduler | by a person "
        "| samples twice, missed | steps with other losses "
        "| SIGKILL: steps made again | 2 ranks, then 1: twice, missed |",
        f"|---|{'---|' * 8}",
    ]
    for peer in ran(record):
        rows = record[peer]
        stops = [rows[name] for name in STOPS if name in rows]
        done = [row for row in stops if row["complete"]]
        if not stops:
            continue
        cells = [
            f"{len(done)} of {len(stops)}" if len(done) < len(stops) else str(len(stops)),
            span([row["made_again"] for row in done]),
            str(sum(row["hung"] > 0 for row in stops)),
            str(sum(bool(row["hands"]) for row in stops)),
            *costs(done)[1:],
            of_kill(rows.get("kill")),
            of_world(rows.get("world")),
        ]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def readme(record: Record) -> str:
    """Each by itself, and the same program under kempner."""
    lines = [
        "| | by itself: steps made again | samples twice, missed | steps with other losses | hung "
        "| under kempner: steps made again | samples twice, missed | steps with other losses |",
        f"|---|{'---|' * 7}",
    ]
    for peer, under in UNDER_KEMPNER.items():
        if peer in record:
            alone, same = stops_of(record[peer]), stops_of(record.get(under, {}))
            hung = sum(record[peer][name]["hung"] > 0 for name in STOPS if name in record[peer])
            cells = [*costs(alone), str(hung), *costs(same)]
            lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def stops_of(rows: Mapping[str, Row]) -> list[Row]:
    return [rows[name] for name in STOPS if name in rows and rows[name]["complete"]]


def costs(stops: Sequence[Row]) -> list[str]:
    """Of the stops of one peer, at worst."""
    if not stops:
        return [""] * 3
    samples = f"{worst(stops, 'twice')}, {worst(stops, 'missed')}"
    return [span([row["made_again"] for row in stops]), samples, str(worst(stops, "losses_differ"))]


def span(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def worst(rows: Sequence[Row], key: str) -> int:
    return max((row.get(key, 0) for row in rows), default=0)


def of_kill(row: Row | None) -> str:
    """Its steps made again, and whether a person had to start it."""
    if row is None:
        return ""
    if not row["complete"]:
        return "does not complete"
    by_hand = ", by a person" if row["hands"] else ""
    return f"{row['made_again']}{by_hand}"


def of_world(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['twice']}, {row['missed']}" if row["complete"] else "does not complete"


def scenarios(record: Record) -> str:
    """A line a peer, a cell a scenario."""
    names = [*STOPS, *OTHERS]
    lines = [f"| | {' | '.join(SAID[name] for name in names)} |", f"|---|{'---|' * len(names)}"]
    for peer in ran(record):
        cells = [cell(record[peer].get(name)) for name in names]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(row: Row | None) -> str:
    """What came of one scenario, in a few words; empty where it was not played."""
    if row is None:
        return ""
    words = ["**hung**"] if row["hung"] else []
    if not row["complete"]:
        return ", ".join([*words, "**did not complete**"])
    if row["twice"] or row["missed"]:
        words.append(f"**{row['twice']} twice, {row['missed']} missed**")
    elif row.get("losses_differ"):
        words.append(f"{row['losses_differ']} other losses")
    elif row.get("weights_equal"):
        words.append("exact")
    elif row.get("weights_equal") is False:
        words.append("other weights")
    else:
        words.append("0 twice, 0 missed")
    words.append(f"{row['made_again']} again")
    if row["hands"]:
        words.append("by a person")
    return ", ".join(words)


def not_run(record: Record) -> str:
    """What never trained to the end here, and what it said."""
    lines = ["| | how | it said |", "|---|---|---|"]
    for peer, rows in record.items():
        for name, row in rows.items():
            if not row["complete"]:
                error = row["error"].replace("|", "\\|")
                what = SAID.get(name, row["options"])
                lines.append(f"| {peer}: {row['of']} | {what} | `{error}` |")
    return "\n".join(lines) + "\n"


def better(record: Record, sources: Mapping[str, Any]) -> str:
    """Where a peer lost fewer steps than kempner in the same scenario, and what sources say."""
    ours = record.get("kempner, plain loop", {})
    lines = []
    for name in [*STOPS, *OTHERS]:
        mine = ours.get(name)
        if mine is None or not mine["complete"]:
            continue
        fewer = [
            f"{peer} ({of_kill(record[peer][name])})"
            for peer in ran(record)
            if not peer.startswith("kempner")
            and name in record[peer]
            and record[peer][name]["complete"]
            and record[peer][name]["made_again"] < mine["made_again"]
        ]
        if fewer:
            them = ", ".join(fewer)
            lines.append(f"- {SAID[name]}: {mine['made_again']} steps made again; fewer: {them}.")
    for entry in sources["better"]:
        lines.append(f"- {entry['says']} ([source]({entry['source']}), {entry['date']}).")
    return "\n".join(lines) + "\n"


def sourced(sources: Mapping[str, Any]) -> str:
    lines = ["| | what its own sources say | |", "|---|---|---|"]
    for entry in sources["sourced"]:
        place = f"[source]({entry['source']}), {entry['date']}"
        lines.append(f"| {entry['name']} | {entry['says']} | {place} |")
    return "\n".join(lines) + "\n"


def conditions(record: Record) -> str:
    """How each was started, and in which version."""
    lines = ["| | versions | with | recipe of |", "|---|---|---|---|"]
    for peer, rows in record.items():
        row = next(iter(rows.values()))
        source = f"[its pages]({row['source']})" if row["source"] else "[here](integrations.md)"
        lines.append(f"| {peer} | {row['of']} | {row['options']} | {source} |")
    dates = sorted({row["date"][:10] for rows in record.values() for row in rows.values()})
    made = f"On {' and '.join(dates)}; each row of the record names its commit and machine."
    return "\n".join(lines) + f"\n\n{made}\n"


if __name__ == "__main__":
    sys.exit(main())
