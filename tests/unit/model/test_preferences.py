"""Learning from pairs of answers: the losses of TRL's trainer, and nothing that packing changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_adapter import CPU, TABLE, adapted, theirs
from tiny_tokenizers import Record, template_of_trl, text, write_tokenizer
from torch import Tensor
from torch.distributed import HashStore

from kempner.config.sections import Config
from kempner.data.files.chat_template import ChatTemplate
from kempner.data.order.batch_slices import Slicing
from kempner.data.prepare.chats import pair_of
from kempner.data.prepare.pipeline import prepare
from kempner.data.serve.loader import Feed, MicroBatch
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import StepGradient, weightless
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.preferences import document_sums, margins, summed_over_pairs

STEPS, ROWS, SEQ_LEN, BETA = 10, 4, 128, 0.5


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config(**train: object) -> Config:
    sizes = {**TABLE["train"], "seq_len": SEQ_LEN, "global_batch_size": ROWS, "micro_batch_size": 1}
    table = {**TABLE, "train": {**sizes, **train}, "adapter": {"rank": 4}}
    return Config.model_validate({**table, "preferences": {"beta": BETA}})


def pair(draw: Random, template: ChatTemplate) -> Record:
    """One of which two, and no more, fit into a row."""
    while True:
        asked = [{"role": "user", "content": text(draw, 4)}]
        answers = {
            key: [{"role": "assistant", "content": f"{key} {text(draw, 4)}"}]
            for key in ("chosen", "rejected")
        }
        record: Record = {"prompt": asked, **answers}
        size = sum(len(document.ids) for document in pair_of(record, template))
        if SEQ_LEN // 3 < size <= SEQ_LEN // 2:
            return record


def taken(data: Path) -> Iterator[list[MicroBatch]]:
    with closing(Feed(data, Slicing(ROWS, 1), seq_len=SEQ_LEN, seed=0)) as feed:
        for _ in range(STEPS):
            step = feed.take()
            assert step is not None
            yield step.micro


def pairs_of(micro: MicroBatch) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of both documents of each pair."""
    assert micro.documents is not None
    parts = [
        tuple(micro.inputs[micro.documents == n].tolist())
        for n in range(int(micro.documents.max()) + 1)
    ]
    return list(zip(parts[::2], parts[1::2], strict=False))


def by_trl(model: torch.nn.Module, folder: Path, records: Sequence[Record]) -> list[list[float]]:
    """Loss, margin and accuracy of each step."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer
    from trl import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    losses: list[float] = []

    class Trainer(DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*arguments, **options)
            losses.append(loss.item())
            return loss

    arguments = DPOConfig(
        str(folder / "out"),
        **{"max_length": None, "beta": BETA, "use_cpu": True, "bf16": False, "max_steps": STEPS},
        **{"per_device_train_batch_size": 2 * ROWS, "save_strategy": "no", "logging_steps": 1},
        **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_beta2": 0.95},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": [], "disable_tqdm": True},
        **{"gradient_checkpointing": False, "dataloader_pin_memory": False},
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(list(records)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "rewards/margins" in line]
    keys = ("rewards/margins", "rewards/accuracies")
    return [
        [loss, *(float(line[key]) for key in keys)]
        for loss, line in zip(losses, logged, strict=True)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_ten_steps_are_those_of_trl(tmp_path: Path) -> None:
    """With PEFT's adapter, and its model without that for the reference: here packed and in micro
    batches, there in rows of a padded batch."""
    folder = write_tokenizer(tmp_path / "model", "llama3", template_of_trl("llama3_training"))
    template, draw = ChatTemplate.beside(folder), Random(8)
    records = [pair(draw, template) for _ in range(2 * ROWS * STEPS)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "pairs.jsonl").write_text(lines, encoding="utf-8")
    options = {"tokenizer": str(folder), "kind": "preferences", "seq_len": SEQ_LEN}
    made = prepare(tmp_path / "data", [tmp_path / "pairs.jsonl"], **options)  # type: ignore[arg-type]
    known = {
        tuple(tuple(each.ids) for each in pair_of(record, template)): record for record in records
    }
    asked = config()
    model = adapted(asked, made.index.vocab_size)
    other = theirs(asked, model, tmp_path)
    optimizer = build_optimizer(
        model, asked.optimizer.model_copy(update={"lr": 1e-2, "weight_decay": 0.0})
    )
    gradient = StepGradient(model, CPU, seed=3, rank=0, beta=BETA)
    ours, order = [], []
    for number, micro in enumerate(taken(tmp_path / "data"), 1):
        means = gradient.add(micro, number)
        update(model, optimizer, means[0], 1e-2, 1.0)
        ours.append(means.tolist())
        order += [known[each] for batch in micro for each in pairs_of(batch)]
    assert len(order) == 2 * ROWS * STEPS
    expected = by_trl(other, folder, order)
    for mine, its in zip(ours, expected, strict=True):
        assert mine == pytest.approx(its, rel=1e-3, abs=1e-5)
    assert ours[0] == pytest.approx([0.6931472, 0, 0])
    assert ours[-1][0] < 0.5
    assert ours[-1][2] == 1


def drawn(model: Transformer, documents: Tensor) -> MicroBatch:
    """Random tokens of these documents, whose first tokens are not learned."""
    generator = torch.Generator().manual_seed(2)
    shape = (documents.shape[0], documents.shape[1] + 1)
    tokens = torch.randint(0, model.shape.vocab_size, shape, generator=generator)
    targets = tokens[:, 1:].clone()
    ends = torch.cat((documents[:, 1:], documents[:, -1:] + 1), 1) != documents
    targets[ends | (documents < 0)] = -100
    return MicroBatch(tokens[:, :-1], targets, documents)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_packed_row_has_the_gradient_of_its_pairs_alone(chunk: int, checkpointing: str) -> None:
    """By the formula, from the logits of each document alone."""
    model = adapted(config(loss_chunk=chunk, activation_checkpointing=checkpointing), 61)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(4))
    sizes = [[5, 9, 7, 3], [12, 11, 1], [24]]  # the last of an odd number is padding
    documents = torch.tensor([[n for n, k in enumerate(row) for _ in range(k)] for row in sizes])
    documents[2] = -1
    micro = drawn(model, documents.int())
    found = summed_over_pairs(model, micro, CPU, BETA)
    found[0].backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in trained.items()}

    def likelihood(row: int, number: int, scale: float) -> Tensor:
        own = documents[row] == number
        tokens, targets = micro.inputs[row][own][:-1], micro.targets[row][own][:-1]
        logits = torch.func.functional_call(
            model, {n: p * scale for n, p in trained.items()}, (tokens[None],)
        )
        return logits[0].log_softmax(-1).gather(1, targets[:, None]).sum()

    expected = torch.zeros(3)
    for row, first in ((0, 0), (0, 2), (1, 0)):
        policy, reference = (
            torch.stack([likelihood(row, number, scale) for number in (first, first + 1)])
            for scale in (1.0, 0.0)
        )
        margin = BETA * ((policy[0] - policy[1]) - (reference[0] - reference[1]))
        expected += torch.stack((torch.log1p(torch.exp(-margin)), margin, (margin > 0).float()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    by_hand = torch.autograd.grad(expected[0], list(trained.values()))
    for (name, gradient), hand in zip(gradients.items(), by_hand, strict=True):
        torch.testing.assert_close(gradient, hand, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_data_weighs_nothing() -> None:
    model = adapted(config(), 61)
    gradient = StepGradient(model, CPU, seed=3, rank=0, beta=BETA)
    means = gradient.add(weightless(2, 1, 12), 1)
    assert means.tolist() == [0, 0, 0]
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_formula() -> None:
    policy, reference = torch.tensor([[-3.0, -5.0]]), torch.tensor([[-4.0, -4.5]])
    assert margins(policy, reference, 0.1).tolist() == pytest.approx([0.15])
    values = torch.arange(1.0, 8).repeat(2, 1)
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    assert document_sums(values, numbers)[0].flatten().tolist() == [3, 12, 13, 0, 0, 0, 0, 0]
    assert document_sums(values, numbers)[1].flatten().tolist() == [*range(1, 8), 0]


@pytest.mark.parametrize("beta", [0, -1.0])
def test_what_cannot_be_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=r"preferences\.beta needs adapter\.rank"):
        Config.model_validate({"preferences": {"beta": 0.1}})
    with pytest.raises(ValueError, match="greater than 0"):
        Config.model_validate({"preferences": {"beta": beta}, "adapter": {"rank": 2}})
    with pytest.raises(ValueError, match=r"does not work with train\.same_on"):
        config(same_on_any_world=True, threads=1)
