"""What Lightning's integration cannot keep exact is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from kempner.integrations.lightning import KempnerEnvironment, Survive
from kempner.integrations.lightning_loop import FitProgress, hold
from kempner.run.process.exit_codes import UsageError


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Backwards(Sampler[int]):
    """Yields another order at each time, whatever the generators say."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter([self.times % 4, *range(3)])

    def __len__(self) -> int:
        return 4


def held(loader: Any) -> Any:
    return hold(loader, 0, (0, 1), lambda same: same, int)


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (DataLoader(Stream()), "Survive cannot bring Stream back to its place"),
        ((n for n in range(3)), "Survive cannot bring generator back to its place"),
        (
            DataLoader(range(4), sampler=Backwards()),  # type: ignore[arg-type]
            r"trainer\.fit\(loader\): Backwards does not give the same order twice",
        ),
    ],
    ids=["stream", "generator", "sampler"],
)
def test_data_without_a_place_is_refused(loader: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        held(loader)


def test_a_run_of_before_there_were_places_goes_on_by_its_count_of_batches() -> None:
    loader = held(DataLoader(range(11), batch_size=2))  # type: ignore[arg-type]
    done = SimpleNamespace(current=SimpleNamespace(ready=2))
    fit = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=done, on_advance_end=None),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=1)),
        _combined_loader=SimpleNamespace(flattened=[loader]),
        _combined_loader_states_to_load=[],
    )
    trainer: Any = SimpleNamespace(fit_loop=fit)
    files: Any = None
    FitProgress(trainer, (0, 1), 0, {}, files)._load_places()
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9], [10]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_held_loader_goes_on_at_any_batch(workers: int) -> None:
    data: Dataset[int] = range(11)  # type: ignore[assignment]

    def loader() -> Any:
        return held(DataLoader(data, 4, shuffle=True, num_workers=workers))

    whole = loader()
    epochs = []
    for epoch in range(2):
        whole.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in whole])
    assert [sorted(chain(*batches)) for batches in epochs] == [[*range(11)]] * 2
    assert epochs[0] != epochs[1]
    for done in range(1, 6):
        first = loader()
        for epoch in range(-(-done // 3)):
            first.set_epoch(epoch)
            batches = iter(first)
            for _ in range(min(3, done - 3 * epoch)):
                next(batches)
        later = loader()
        later.load_state_dict(first.state_dict())
        later.set_epoch(done // 3)
        assert [batch.tolist() for batch in later] == epochs[done // 3][done % 3 :]
        assert len(later) == 3


def test_ranks_that_lightning_does_not_know_of_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    environment = KempnerEnvironment()
    assert (environment.devices, environment.num_nodes, environment.strategy) == (2, 2, "ddp")
    environment.validate_settings(2, 2)
    sentence = 'give it devices=2, num_nodes=2, strategy="ddp"'
    with pytest.raises(UsageError, match=sentence):
        environment.validate_settings(1, 1)


@pytest.mark.parametrize("version", ["2.4.1", "2.7.0", "3.0.0"])
def test_another_lightning_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "__version__", version)
    with pytest.raises(UsageError, match=rf"this is Lightning {version}, and kempner knows 2\.5"):
        KempnerEnvironment()


@pytest.mark.parametrize("wrong", [{"save_every": 0}, {"save_every": 1, "keep_last": 1}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="it must be at least"):
        Survive(**wrong)
