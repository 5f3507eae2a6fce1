"""What a configuration asks of its data, by their indexes alone: nothing is read here."""

from __future__ import annotations

from kempner.config.sections import Config
from kempner.data.files.compatibility import check_compatible
from kempner.data.files.index import Index, sample_count
from kempner.run.process.exit_codes import DataError


def vocabulary(config: Config, index: Index) -> int:
    """How many token ids the model has: as configured, else as many as its data.

    Raises DataError, naming the key to set, if the data has more than are configured.
    """
    wanted, there = config.model.vocab_size, index.vocab_size
    if wanted is not None and wanted < there:
        raise DataError(
            f"model.vocab_size={wanted} is too small for data.dataset_path="
            f"{config.data.dataset_path}, which has {there} token ids: set "
            f"--model.vocab_size={there}"
        )
    return wanted or there


def check_samples(config: Config, index: Index) -> None:
    """Raise DataError if the data has not one sample of the configured length."""
    try:
        sample_count(index, config.train.seq_len)
    except DataError as error:
        raise DataError(f"data.dataset_path={config.data.dataset_path}: {error}") from error


def check_held_out(config: Config, index: Index, held_out: Index) -> None:
    """Raise DataError if a model that learns from `index` cannot be evaluated on `held_out`."""
    if refusal := check_compatible(index, held_out, config.train.seq_len):
        raise DataError(
            f"eval.dataset_path={config.eval.dataset_path}: {refusal}, or remove eval.interval "
            "from the configuration"
        )
