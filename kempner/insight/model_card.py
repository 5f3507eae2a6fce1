"""The card of an exported model: README.md for Hugging Face, of what the run itself knows.

A card is public: it names no path, host or account, and of the configuration only what
the weights depend on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from kempner.checkpoint.format.manifest import Manifest
from kempner.data.files.index import Index, fingerprint, read_index
from kempner.insight.report.page.words import duration
from kempner.insight.report.series import EvalSeries, StepSeries
from kempner.insight.report.summary import RunData, read_run
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import DataError, RunError
from kempner.run.record.recorded_config import recorded_config
from kempner.run.record.run_dir import RunDirectory

CARD = "README.md"
_BASE_MODEL = "base_model.json"
_SHOWN = ("model", "train", "optimizer", "scheduler", "data", "parallelism", "preferences")
"""Sections of the configuration that the weights depend on."""
_PATHS = ("dataset_path", "dir")


@dataclass(frozen=True)
class DataFacts:
    """A prepared directory: its name alone, and what its index says. `digest` is that of its
    samples, as `kempner checkpoint list` and a resume compare it."""

    name: str
    tokens: int
    documents: int
    digest: str
    tokenizer: str


@dataclass(frozen=True)
class CardFacts:
    """What is known of a checkpoint and its run; None or empty where it is not. `evaluations` are
    losses in nats per token by held-out set, `worlds` the numbers of ranks, `steps_lost` those that
    had to be made again."""

    name: str
    step: int
    loads: bool
    """Whether transformers can load it: the model is kempner's own."""
    tokens: int = 0
    total_steps: int | None = None
    data: DataFacts | None = None
    worlds: Sequence[int] = ()
    wall_seconds: float | None = None
    restarts: int | None = None
    steps_lost: int | None = None
    loss: float | None = None
    evaluations: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    base_model: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def card(facts: CardFacts) -> str:
    """The text of README.md; see https://huggingface.co/docs/hub/model-cards."""
    head: dict[str, Any] = {"tags": ["kempner"]}
    if facts.loads:
        head = {"library_name": "transformers", "pipeline_tag": "text-generation", **head}
    if "repository" in facts.base_model:
        head["base_model"] = facts.base_model["repository"]
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _rows(facts))
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {_cell(facts.name)}",
        "Trained with kempner, which also wrote this card from the run's own records.",
        f"| | |\n|---|---|\n{rows}",
    ]
    if facts.config:
        table = tomli_w.dumps(facts.config).rstrip()
        parts.append(f"## Configuration\n{_fenced(table)}")
    return "\n\n".join(parts) + "\n"


def _rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    of = "" if facts.total_steps is None else f" of {facts.total_steps:,}"
    yield "Steps", f"{facts.step:,}{of}"
    if facts.tokens:
        yield "Tokens seen", f"{facts.tokens:,}"
    if (data := facts.data) is not None:
        counts = f"{data.tokens:,} tokens, {data.documents:,} documents"
        yield "Data", f"{data.name}: {counts}, digest {data.digest}, tokenizer {data.tokenizer}"
    if facts.base_model:
        at = facts.base_model.get("commit")
        yield "Base model", f"{facts.base_model.get('repository')}{f' at {at}' if at else ''}"
    pairs = "beta" in facts.config.get("preferences", {})
    unit = "nats per pair (DPO)" if pairs else "nats per token"
    if facts.loss is not None:
        yield "Training loss", f"{facts.loss:.4f} {unit}"
    for name, loss in facts.evaluations.items():
        perplexity = "" if pairs or loss >= 700 else f", perplexity {math.exp(loss):,.2f}"
        yield f"Loss on {name or 'held-out data'}", f"{loss:.4f} {unit}{perplexity}"
    if facts.worlds:
        yield "Ranks", ", then ".join(f"{ranks:,}" for ranks in facts.worlds)
    if facts.wall_seconds is not None:
        yield "Wall time", duration(facts.wall_seconds)
    if facts.restarts is not None:
        lost = "" if facts.steps_lost is None else f", {facts.steps_lost:,} steps made again"
        yield "Restarts", f"{facts.restarts:,}{lost}"
    if facts.versions:
        yield "Software", ", ".join(f"{name} {v}" for name, v in facts.versions.items())


def _cell(text: str) -> str:
    """Text that stays in its cell, and is no markup."""
    plain = " ".join(text.split())
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>|#" else c for c in plain)


def _fenced(text: str) -> str:
    longest = max((len(run) for run in text.split("\n") if set(run) == {"`"}), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}toml\n{text}\n{fence}"


def known_facts(run: RunDirectory, manifest: Manifest, loads: bool) -> CardFacts:
    """What the manifest, the ledger, the metrics and the configuration say of a checkpoint. What
    cannot be read is not known."""
    state, identity = manifest.train_state, manifest.identity
    config = recorded_config(run, manifest.attempt)
    facts = CardFacts(
        name=run.path.resolve().name,
        step=state.step,
        loads=loads,
        tokens=state.tokens,
        worlds=[identity.world] if identity.model else [],
        data=_data_facts(config, identity.data_fingerprint),
        versions=identity.origin.versions,
        base_model=_read_base_model(run.checkpoints),
        config=_published(config),
    )
    try:
        return _with_history(facts, read_run(run), manifest.attempt)
    except RunError:  # never started here: imported, or copied without its ledger
        return facts


def _with_history(facts: CardFacts, data: RunData, attempt: int) -> CardFacts:
    made = [one for one in data.attempts if one.number <= attempt]
    if not made:
        return facts
    lost = [
        one.place.steps_lost for one in data.report.interruptions if one.attempt < made[-1].number
    ]
    worlds = [one.started.ranks for one in made]
    evaluations = {n: _at(one, facts.step) for n, one in data.evaluations.items()}
    return replace(
        facts,
        total_steps=data.report.training.total_steps,
        worlds=[n for at, n in enumerate(worlds) if at == 0 or n != worlds[at - 1]],
        wall_seconds=made[-1].end - made[0].begin,
        restarts=len(made) - 1,
        steps_lost=sum(n for n in lost if n is not None) if None not in lost else None,
        loss=_at(data.steps.last_of_each_step(), facts.step),
        evaluations={name: loss for name, loss in evaluations.items() if loss is not None},
    )


def _at(series: StepSeries | EvalSeries, step: int) -> float | None:
    """The last value until `step`."""
    until = series.loss[series.step <= step]
    return float(until[-1]) if len(until) and math.isfinite(until[-1]) else None


def _data_facts(config: Mapping[str, Any], known: str | None) -> DataFacts | None:
    """Of the data that the checkpoint was trained on; not of others that lie there now."""
    try:
        folder = Path(config["data"]["dataset_path"])
        index: Index = read_index(folder)
        digest = fingerprint(index, config["train"]["seq_len"])
    except (LookupError, TypeError, DataError):
        return None
    if digest != known:
        return None
    tokenizer = index.tokenizer_name.rpartition("/")[0] or index.tokenizer.kind
    return DataFacts(folder.name, index.tokens, index.documents, digest, tokenizer)


def _published(config: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: config[name] for name in _SHOWN if isinstance(config.get(name), dict)}
    return {
        name: {key: value for key, value in table.items() if key not in _PATHS}
        for name, table in tables.items()
    }


def keep_base_model(checkpoints: Path, known: Mapping[str, str]) -> None:
    """Note beside the checkpoints which model of Hugging Face they began with, if that is known."""
    if known:
        content = json.dumps(dict(known)).encode() + b"\n"
        replace_durable(checkpoints / _BASE_MODEL, content, unique="kempner")


def _read_base_model(checkpoints: Path) -> dict[str, str]:
    try:
        found = json.loads((checkpoints / _BASE_MODEL).read_bytes())
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in items if isinstance(value, str)}
