"""A few layers stand for all; and what a step computes and sends is what the formulas say."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest

from kempner.config.sections import Config, DataSection
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.spec.step_time import step_flops
from kempner.training.plan.plan import plan
from kempner.training.plan.timeline import PeakMemory, StepPhase, StepPlace, TracedStep, peak
from kempner.training.plan.trace import Step, trace, traced, whole

VOCAB = 1000
SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}


def config(
    layers: int = 8, optimizer: str = "adamw", vocab_size: int = VOCAB, **train: object
) -> Config:
    asked = {"dtype": "bfloat16", "seq_len": 64, "global_batch_size": 64, **train}
    model = {**SIZES, "n_layers": layers, "vocab_size": vocab_size, "vocab_multiple": 8}
    return Config.model_validate({"model": model, "train": asked, "optimizer": {"name": optimizer}})


ONCE = Choice(reduce_once=True, keep_parameters=True)
CASES = {
    "alone": (config(), MeshDegrees(), Choice(), 1),
    "shards": (config(), MeshDegrees(1, 4), Choice(), 3),
    "kept": (config(dtype="float32"), MeshDegrees(2, 4), ONCE, 5),
    "recomputed": (config(activation_checkpointing="full"), MeshDegrees(1, 4), ONCE, 2),
    "every second": (
        config(12, activation_checkpointing="selective", activation_checkpointing_every=2),
        MeshDegrees(1, 4),
        Choice(),
        2,
    ),
    "every second, odd": (
        config(11, activation_checkpointing="full", activation_checkpointing_every=2),
        MeshDegrees(1, 3),
        Choice(),
        1,
    ),
    "tensor groups": (config(), MeshDegrees(2, 2, 2), Choice(), 4),
    "slots": (config(same_on_any_world=True, threads=1), MeshDegrees(1, 4), ONCE, 4),
    "slots in turn": (config(same_on_any_world=True, threads=1), MeshDegrees(2, 2), Choice(), 4),
    # Whose peak is in the backward of the first block, when all gradients are there.
    "gradients outweigh": (config(vocab_size=8, seq_len=8), MeshDegrees(), Choice(), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_few_layers_stand_for_all(case: str) -> None:
    asked, mesh, choice, micro_steps = CASES[case]
    vocab_size = asked.model.vocab_size or 0
    step = Step(asked, vocab_size, mesh, choice, micro_steps, as_on_gpu=True)
    complete = whole(trace(step, asked.model.n_layers), micro_steps)
    short = traced(step)
    assert short.memory == complete.memory
    assert short.flops == complete.flops
    assert short.sent == complete.sent
    assert short.state == complete.state


def test_all_micro_steps_between_the_first_and_the_last_are_alike() -> None:
    asked = config(3)
    three, nine = (
        whole(trace(Step(asked, VOCAB, MeshDegrees(1, 4), Choice(), number, False), 3), number)
        for number in (3, 9)
    )
    assert nine.memory == three.memory
    assert nine.flops == 3 * three.flops
    assert {kind: 3 * size for kind, size in three.sent.items()} == nine.sent


def test_norms_that_are_one_kernel_keep_less() -> None:
    asked = config(3)
    steps = (Step(asked, VOCAB, MeshDegrees(), Choice(), 1, fused) for fused in (False, True))
    composed, fused = (peak(trace(step, 3)) for step in steps)
    # Beside its output and a scale a row, each of six norms kept one more float32 tensor.
    assert composed.activations - fused.activations >= 6 * 4 * 64 * 64
    assert composed.parameters == fused.parameters
    assert composed.loss >= fused.loss


def test_the_mask_of_documents_takes_a_byte_for_each_pair_while_it_is_made() -> None:
    plain = config(3)
    train, forward = plain.train, StepPlace("forward", 0, -1)
    pairs = train.micro_batch_size * train.seq_len**2
    grown = {}
    for masked in (False, True):
        data = DataSection(document_mask=masked)
        asked = plain.model_copy(update={"data": data})
        step = Step(asked, VOCAB, MeshDegrees(), Choice(), 1, as_on_gpu=True)
        (held,) = (s.memory.sum(1) for s in trace(step, 3).segments if s.place == forward)
        grown[masked] = held.max() - held[0]
        assert traced(step).flops == step_flops(Shape.of(asked.model, VOCAB), train, 1)
    assert pairs <= grown[True] - grown[False] <= 4 * pairs


ANYWHERE = {"same_on_any_world": True, "threads": 1, "global_batch_size": 21}
PLANS = {
    "shards": {},
    "all logits": {"train": {"loss_chunk": 0}},
    "recomputed": {"train": {"activation_checkpointing": "full"}},
    "every second": {
        "train": {"activation_checkpointing": "full", "activation_checkpointing_every": 2}
    },
    "replicas": {"parallelism": {"data_parallel_replicate_degree": 2}},
    "tensor groups": {"parallelism": {"tensor_parallel_degree": 2}},
    "both": {
        "train": {"activation_checkpointing": "selective"},
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2},
    },
    "dropout": {"model": {"dropout": 0.1}, "train": {"activation_checkpointing": "full"}},
    "dropout in tensor groups": {
        "model": {"dropout": 0.1},
        "train": {"activation_checkpointing": "selective"},
        "parallelism": {"tensor_parallel_degree": 2},
    },
    "Muon": {"optimizer": {"name": "muon"}},
    "qwen": {"model": {"qk_norm": True, "head_dim": 32, "tie_embeddings": True}},
    "adapter": {"adapter": {"rank": 4}, "parallelism": {"tensor_parallel_degree": 2}},
    "preferences": {"adapter": {"rank": 4}, "preferences": {"beta": 0.1}},
    "preferences, tensor groups": {
        "adapter": {"rank": 4},
        "preferences": {"beta": 0.1},
        "train": {"activation_checkpointing": "full"},
        "parallelism": {"tensor_parallel_degree": 2, "reshard_after_forward": "always"},
    },
    "slots": {"train": ANYWHERE, "parallelism": {"reduce_gradients": "step"}},
    "slots in turn": {"train": ANYWHERE, "parallelism": {"reduce_gradients": "micro_batch"}},
    "slots, replicas": {
        "train": ANYWHERE,
        "parallelism": {"data_parallel_replicate_degree": 2, "reduce_gradients": "step"},
    },
    "slots in turn, replicas, adapter": {
        "adapter": {"rank": 4},
        "train": ANYWHERE,
        "parallelism": {"data_parallel_replicate_degree": 2, "reduce_gradients": "micro_batch"},
    },
    "parts of an adapter": {
        "adapter": {"rank": 3, "targets": ["v_proj", "down_proj"]},
        "train": {"activation_checkpointing": "selective"},
        "parallelism": {"data_parallel_replicate_degree": 2},
    },
}


@pytest.mark.parametrize("case", PLANS)
def test_flops_and_bytes_are_those_of_the_formulas(case: str) -> None:
    sections = config(7).model_dump(exclude_none=True)
    for section, changes in PLANS[case].items():
        sections[section] |= changes
    made = plan(Config.model_validate(sections), 8, nodes=2)
    assert made.flops.traced == made.flops.by_formula > 0
    assert made.sent.traced == made.sent.by_formula > 0


def test_the_formula_of_flops_is_that_of_a_whole_step() -> None:
    """Tied to `flops_per_token`: six for each parameter that multiplies, and attention."""
    asked = config(7)
    shape = Shape.of(asked.model, VOCAB)
    tokens = 3 * asked.train.seq_len
    multiplied = shape.n_layers * (shape.block_parameters - shape.block_norm_parameters)
    expected = 6 * (multiplied + VOCAB * shape.dim) + 14 * 7 * shape.q_dim * asked.train.seq_len
    assert step_flops(shape, asked.train, sequences=3) == tokens * expected


def test_what_a_step_computes_is_its_forwards_and_backwards() -> None:
    nothing: Counter[Any] = Counter()
    phases = [
        StepPhase("forward", 4, Counter({(5, 0): 2}), nothing),
        StepPhase("backward", 3, Counter({(10, 0): 1}), nothing),
        StepPhase("update", 1, Counter({(7, 0): 1}), nothing),
    ]
    memory = PeakMemory(*(0 for _ in fields(PeakMemory)))
    assert TracedStep(memory, phases, state=0).flops == 4 * 2 * 5 + 3 * 10
