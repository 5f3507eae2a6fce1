"""Whether the data fits the configuration: present, readable, and of one vocabulary."""

from __future__ import annotations

from kempner.config.sections import Config
from kempner.data.files.requirements import check_held_out, check_samples, vocabulary
from kempner.insight.doctor.facts.data import DataSet
from kempner.insight.doctor.finding import Finding, Outcome, fail, finding, passed, skipped
from kempner.run.output.units import count
from kempner.run.process.exit_codes import RunError


def vocabulary_of(config: Config, data: DataSet) -> int | None:
    """How many token ids the model has; None where neither configuration nor data say it."""
    if data.index is None:
        return config.model.vocab_size
    return config.model.vocab_size or data.index.vocab_size


def check_data(config: Config, data: DataSet, held_out: DataSet | None) -> list[Finding]:
    """The training data, its tokenizer, and the held-out data."""
    found = [finding("data", _present(data)), finding("tokenizer", _tokenizer(config, data))]
    if held_out is not None:
        found.append(finding("held-out data", _held_out(config, data, held_out)))
    return found


def _present(data: DataSet) -> Outcome:
    if data.index is None:
        return fail(data.trouble)
    if data.unreadable:
        return fail(data.unreadable)
    index = data.index
    return passed(f"{data.folder}: {index.tokens:,} tokens in {count(len(index.shards), 'file')}")


def _tokenizer(config: Config, data: DataSet) -> Outcome:
    if data.index is None:
        return skipped(f"not known, since {data.key}={data.folder} cannot be used")
    if data.tokenizer:
        return fail(data.tokenizer)
    try:
        size = vocabulary(config, data.index)
        check_samples(config, data.index)
    except RunError as error:
        return fail(str(error))
    name = data.index.tokenizer_name or data.index.tokenizer.kind
    return passed(f"{name}: {data.index.vocab_size} token ids, the model has {size}")


def _held_out(config: Config, data: DataSet, held_out: DataSet) -> Outcome:
    trouble = held_out.trouble or held_out.unreadable or held_out.tokenizer
    if trouble:
        return fail(trouble)
    if data.index is not None and held_out.index is not None:
        try:
            check_held_out(config, data.index, held_out.index)
        except RunError as error:
            return fail(str(error))
    tokens = 0 if held_out.index is None else held_out.index.tokens
    return passed(f"{held_out.folder}: {tokens:,} tokens")
