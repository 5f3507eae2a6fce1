"""What only tells people something is told from what training depends on."""

from __future__ import annotations

import pytest

from kempner.rehearse.compare import names_that_matter

LOOP = """
for step in survive(model, optimizer, steps=9, save_every=3):
    loss = model(batch).mean()
    {line}
"""

TOLD = [
    "seen.append(loss.item()); print(seen)",
    "seen += loss.item(); print(f'{seen / step:.3f}')",
    "seen.append(loss.item()); mean = sum(seen) / len(seen); logging.info('%f', mean)",
    "seen = time.time() - seen; writer.add_scalar('seconds', seen)",
    "mean = sum(seen) / len(seen); print(mean); loss.mean().backward()",
    "print(max(value for value in seen))",
    "history = {}; history[step] = seen; print(history)",
]

USED = [
    "(loss * seen).backward()",
    "loss = loss * seen; loss.backward()",
    "clip(model.parameters(), seen)",
    "limit = sum(seen) / len(seen); clip(model.parameters(), limit)",
    "seen = min(seen, loss.item()); stop = seen < 1",
    "optimizer.param_groups[0]['lr'] = seen",
    "torch.save({'seen': seen}, 'best.pt')",
    "x = batches[seen]; model(x)",
    "for group in optimizer.param_groups: group['lr'] = seen",
    "seen.observe(loss)",
]


@pytest.mark.parametrize("line", TOLD)
def test_what_is_told_is_harmless(line: str) -> None:
    assert "seen" not in names_that_matter([LOOP.format(line=line)])


@pytest.mark.parametrize("line", [*USED, "if seen > 3:\n        break"])
def test_what_training_depends_on_matters(line: str) -> None:
    used = line.replace("; stop = seen < 1", "\n    if seen < 1: break")

    assert "seen" in names_that_matter([LOOP.format(line=used)])


def test_a_condition_of_what_is_told_is_harmless() -> None:
    line = "if seen > 3:\n        print(loss)"

    assert "seen" not in names_that_matter([LOOP.format(line=line)])


def test_a_value_is_followed_through_attributes_and_functions_of_other_files() -> None:
    meter = """
class Meter:
    def update(self, value):
        self.total += value
    def mean(self):
        return self.total / self.count
"""
    told = LOOP.format(line="meter.update(loss.item()); print(meter.mean())")
    used = LOOP.format(line="meter.update(loss.item()); clip(model, meter.mean())")

    assert "total" not in names_that_matter([meter, told])
    assert "total" in names_that_matter([meter, used])
