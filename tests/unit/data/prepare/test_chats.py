"""Chats to rows: tokens and targets are TRL's, and what cannot be used is told in one sentence."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from numpy.typing import NDArray
from tiny_tokenizers import (
    CHATML,
    TOOLS,
    Record,
    forms,
    messages,
    template_of_trl,
    text,
    write_tokenizer,
)

from kempner.config.sections import Config
from kempner.data.files.index import check_compatible, check_samples
from kempner.data.files.token_file import BEGINS, ID, LEARNED, Corpus
from kempner.data.prepare import pipeline, sources
from kempner.data.prepare.documents import Tally
from kempner.data.prepare.pipeline import PreparedData, prepare
from kempner.data.prepare.rows import packed
from kempner.data.serve.loader import IGNORE, eval_batches
from kempner.model.initial_weights import initialise
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.process.exit_codes import DataError, RunError, UsageError
from kempner.training.compute.forward_backward import summed_loss

Learned = tuple[list[int], list[bool]]

CPU = torch.device("cpu")
SEQ_LEN = 160
MARKED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MODELS = {  # our template, and TRL's
    "llama3": ("llama3", template_of_trl("llama3"), template_of_trl("llama3")),
    "llama3, marked": ("llama3", *[template_of_trl("llama3_training")] * 2),
    "qwen3": ("qwen", *[template_of_trl("qwen3_training")] * 2),
    "qwen2.5": ("qwen", *[template_of_trl("qwen2_5_training")] * 2),
    "chatml": ("qwen", CHATML, MARKED),
}


def by_trl(folder: Path, records: list[Record], most: int, marked: bool = True) -> list[Learned]:
    """What TRL's SFTTrainer makes of them: tokens, and which of them are labels. `marked` is
    whether the template is to mark the answers of messages."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer
    from trl import SFTConfig
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.trainer.sft_trainer import SFTTrainer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = "prompt" in records[0]
    answers = marked and not (pairs and isinstance(records[0]["prompt"], str))
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}
    arguments = SFTConfig(
        str(folder / "out"), max_length=most, assistant_only_loss=answers, **options
    )
    swapped = answers and not has_generation_markers(tokenizer.chat_template)
    template = get_training_chat_template(tokenizer) if swapped else None
    trainer = SimpleNamespace(
        chat_template=template, _tokenizer=tokenizer, completion_only_loss=pairs
    )
    rows = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list(records), tokenizer, arguments, False, None, "train"
    )
    made = [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in rows]
    # The first token is no target of TRL's, either: its loss is of what follows a token.
    return [(ids, [False, *learned[1:]]) for ids, learned in made if any(learned[1:])]


def write_lines(path: Path, records: Sequence[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def prepared(
    out: Path, files: Sequence[Path], tokenizer: Path, seq_len: int = SEQ_LEN, **options: Any
) -> PreparedData:
    return prepare(out, files, tokenizer=str(tokenizer), kind="chats", seq_len=seq_len, **options)


def stream(out: Path) -> NDArray[np.uint32]:
    corpus = Corpus.open(out)
    return np.asarray(corpus.read(0, corpus.index.tokens), np.uint32)


def documents(tokens: NDArray[np.uint32]) -> Iterator[Learned]:
    """What begins at each BEGINS; padding, of which nothing is learned, is left out."""
    starts = np.flatnonzero(tokens & BEGINS)
    for part in np.split(tokens, starts[1:]):
        learned = (part & LEARNED != 0).tolist()
        if any(learned):
            yield (part & ID).tolist(), learned


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml"), "qwen", CHATML)


@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_targets_are_those_of_trl(model: str, tmp_path: Path) -> None:
    """A thousand chats of all forms, whole ones and such as are longer than a row."""
    family, ours, theirs = MODELS[model]
    folder = write_tokenizer(tmp_path / "ours", family, ours)
    of_trl = write_tokenizer(tmp_path / "theirs", family, theirs)
    draw = Random(model)
    made = forms(draw, 50, thinks=family == "qwen", calls=model in ("qwen3", "qwen2.5"))
    if model in ("qwen3", "qwen2.5"):
        made["tools"] = [{"messages": messages(draw, calls=True), "tools": TOOLS} for _ in "12345"]
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        made["options"] = [{"messages": messages(draw), **quiet} for _ in "12345"]
    files = [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in made.items()]
    expected = [each for rows in made.values() for each in by_trl(of_trl, rows, SEQ_LEN)]
    out = tmp_path / "out"
    index = prepared(out, files, folder).index
    assert sum(shard.bad_lines for shard in index.shards) == 0
    assert sorted(documents(stream(out))) == sorted(expected)
    assert index.documents == len(expected)
    rows = stream(out)[:-1].reshape(-1, SEQ_LEN)
    assert (rows[:, 0] & BEGINS).all()
    assert (rows & LEARNED).any(axis=1).all()


def test_an_answer_that_is_rendered_otherwise_later_is_learned_as_it_is_given(
    tmp_path: Path,
) -> None:
    """Qwen3's own template drops the thoughts of earlier answers: each is a document of its own,
    and the same as TRL has it from the chat before as prompt and the answer as completion."""
    folder = write_tokenizer(tmp_path / "qwen", "qwen", template_of_trl("qwen3"))
    draw = Random(5)
    chats = [messages(draw, thinks=True) for _ in range(40)]
    chats = [chat if chat[-1]["role"] == "assistant" else chat[:-1] for chat in chats]
    answers = [
        {"prompt": chat[:at], "completion": chat[at : at + 1]}
        for chat in chats
        for at, message in enumerate(chat)
        if message["role"] == "assistant"
    ]
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    index = prepared(tmp_path / "out", [lines], folder, 4096).index
    assert index.documents == len(answers) > len(chats)
    expected = by_trl(folder, answers, 4096, marked=False)
    assert sorted(documents(stream(tmp_path / "out"))) == sorted(expected)


def test_a_packed_row_has_the_loss_of_its_documents_alone(tmp_path: Path, tokenizer: Path) -> None:
    records = [record for rows in forms(Random(2), 8).values() for record in rows]
    prepared(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", records)], tokenizer)
    model = tiny_transformer(Corpus.open(tmp_path / "out").index.vocab_size)
    alone = 0.0
    for ids, learned in documents(stream(tmp_path / "out")):
        tokens, counts = torch.tensor([ids]), torch.tensor([learned])
        targets = torch.where(counts, tokens, IGNORE)[:, 1:]
        alone += model(tokens[:, :-1], targets).item()
    corpus = Corpus.open(tmp_path / "out")
    found, unmasked, seen = 0.0, 0.0, 0
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 4, "micro_batch_size": 2}
    for rank in range(3):
        for batch in eval_batches(corpus, **sizes, rank=rank, world=3, max_batches=999):
            for micro in batch:
                found += summed_loss(model, micro, CPU).item()
                unmasked += summed_loss(model, micro._replace(documents=None), CPU).item()
                seen += (micro.targets != IGNORE).sum().item()
    assert seen == (stream(tmp_path / "out") & LEARNED != 0).sum()
    assert found == pytest.approx(alone, rel=1e-5)
    assert found != pytest.approx(unmasked, rel=1e-3)  # so that it depends on what is attended to


def tiny_transformer(vocab_size: int) -> Transformer:
    shape = Shape(
        **{"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "ffn_dim": 32},
        **{"vocab_size": vocab_size, "max_seq_len": SEQ_LEN, "rope_theta": 1e4, "norm_eps": 1e-5},
        **{"tie_embeddings": True, "dropout": 0.0},
    )
    model = Transformer(shape)
    initialise(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)  # otherwise the loss hardly depends on what is attended to
    return model.eval()


def test_rows_do_not_depend_on_who_makes_them(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the number of processes nor on an interruption; nor on how the chats are kept."""
    monkeypatch.setattr(sources, "_UNIT", 20_000)
    monkeypatch.setattr(pipeline, "_WORTH_A_PROCESS", 1)
    records = [{"messages": messages(Random(n))} for n in range(150)]
    lines = write_lines(tmp_path / "a.jsonl", records)
    index = prepared(tmp_path / "alone", [lines], tokenizer).index
    assert len(index.shards) > 3
    assert prepared(tmp_path / "two", [lines], tokenizer, workers=2).index == index

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        prepared(tmp_path / "stopped", [lines], tokenizer, on_progress=stop)
    again = prepared(tmp_path / "stopped", [lines], tokenizer)
    assert again.index == index
    assert 0 < again.kept < len(index.shards)
    assert prepared(tmp_path / "stopped", [lines], tokenizer).was_finished
    with pytest.raises(UsageError, match=f"was prepared as chats in rows of {SEQ_LEN} tokens"):
        prepared(tmp_path / "stopped", [lines], tokenizer, SEQ_LEN + 1)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    prepared(tmp_path / "table", [tmp_path / "a.parquet"], tokenizer, 4096)
    prepared(tmp_path / "packed", [zipped(lines)], tokenizer, 4096)
    kept = [sorted(documents(stream(tmp_path / name))) for name in ("table", "packed")]
    assert kept[0] == kept[1]
    assert len(kept[0]) == len(records)


def zipped(path: Path) -> Path:
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def test_rows_are_full_and_hold_every_document_once() -> None:
    draw = Random(4)
    for capacity in (1, 7, 64, 1000):
        sizes = [draw.randint(1, capacity) for _ in range(draw.randint(0, 200))]
        rows = list(packed(sizes, capacity))
        assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
        held = sorted(sum(sizes[number] for number in row) for row in rows)
        assert all(size <= capacity for size in held)
        # Two rows that fit into one would not both be there.
        assert all(a + b > capacity for a, b in pairwise(held))


def malformed(draw: Random) -> Iterator[tuple[str, str]]:
    """Lines of which no chat can be made, and the words that say why."""
    chat = messages(draw)
    yield "[]", "is a JSON list, not an object"
    yield "{", "is not JSON"
    yield json.dumps({}), "it has: none"
    yield json.dumps({"text": "a"}), r'neither "messages" nor "conversations".*\(it has: text\)'
    yield json.dumps({"prompt": "a"}), r"\(it has: prompt\)"
    yield json.dumps({"prompt": "a", "completion": ""}), "its completion is empty"
    yield json.dumps({"prompt": "a", "completion": chat}), '"prompt" is not a list of messages'
    yield json.dumps({"prompt": "a", "completion": "\ud800"}), "half a surrogate pair"
    for key in ("messages", "conversations"):
        for value in ("text", 3, [], {}, True):
            yield json.dumps({key: value}), f'"{key}" is not a list of messages'
        for value in ("text", None, 3, []):
            yield json.dumps({key: [*chat, value]}), rf"message {len(chat) + 1} of {key} is not an"
        for without in ({"content": "a"}, {"role": 3, "content": "a"}, {"from": [], "value": "a"}):
            yield json.dumps({key: [without]}), f'message 1 of {key} has no "role"'
        for content in (3, {"a": 1}, True):
            yield json.dumps({key: [{"role": "user", "content": content}]}), "neither text nor a"
        yield json.dumps({key: [{"role": "user"}]}), "the chat template refuses it"
        yield json.dumps({key: [{"role": "user", "content": [1, 2]}]}), "the chat template refuses"
        yield json.dumps({key: [{"role": "user", "content": "a"}]}), "no answer of an assistant"
        yield json.dumps({key: [{"role": "assistant", "content": "a"}]}), "begins with an answer"
        yield json.dumps({key: [{"role": "user", "content": "\ud800"}, *chat]}), "template refuses"
    for tools in ("{", 3, {}, [3], ["a"]):
        yield (
            json.dumps({"messages": chat, "tools": tools}),
            'in "tools" is not JSON|"tools" is not a',
        )
    for options in (3, [], "a"):
        yield json.dumps({"messages": chat, "chat_template_kwargs": options}), "is not an object"
    for own in ("tokenize", "padding", "chat_template", "return_dict"):
        with_own = {"messages": chat, "chat_template_kwargs": {own: False}}
        yield json.dumps(with_own), f"chat_template_kwargs has {own}, which is no template's"


def test_lines_without_a_chat_are_told_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    draw = Random(6)
    good = [json.dumps({"messages": messages(draw)}) for _ in range(3)]
    lines = list(malformed(draw))
    assert len(lines) > 50
    for number, (line, reason) in enumerate(lines):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join([good[0], line, *good[1:]]))
        with pytest.raises(DataError, match=reason) as refused:
            prepared(tmp_path / f"out{number}", [file], tokenizer)
        assert f"{file}:2: " in str(refused.value)
        assert "\n" not in str(refused.value)
    everything = tmp_path / "all.jsonl"
    everything.write_text("\n".join([*good, *(line for line, _ in lines)]))
    made = prepared(tmp_path / "all", [everything], tokenizer, max_bad_share=0.99)
    assert sum(shard.bad_lines for shard in made.index.shards) == len(lines)
    assert made.index.documents == len(good)


TEMPLATES = {
    "{% for m in messages %}": "the chat template cannot be used",
    "{{ messages | nothing }}": "the chat template cannot be used",
    "{% generation %}a": "the chat template cannot be used",
    "{{ raise_exception('no roles') }}": "refuses it: no roles",
    "{{ ''.__class__.__mro__ }}": "the chat template refuses it",
    "{{ messages[99].content.strip() }}": "the chat template refuses it",
    "{{ 1 / 0 }}": "the chat template refuses it",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "the chat template refuses it",
    "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}": "renders the question",
    "{{ messages[0].content }}{% generation %}{% endgeneration %}": "no answer of an assistant",
    "no messages": "no answer of an assistant to learn from",
}
SETTINGS = {
    "{": "cannot be used",
    "[]": "cannot be used",
    '{"bos_token": 3}': "cannot be used",
    '{"chat_template": 3}': "its chat template is no text",
    "{}": "has no chat template",
    '{"added_tokens_decoder": {"x": {}}}': "cannot be used",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_cannot_be_used_are_told(template: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", "qwen", template)
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": messages(Random(1))}])
    with pytest.raises(RunError, match=TEMPLATES[template]) as refused:
        prepared(tmp_path / "out", [lines], folder)
    assert "\n" not in str(refused.value)


def test_a_template_that_was_torn_works_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    draw, sentences = Random(3), dict[str, str]()
    known = [CHATML, *(template_of_trl(name) for name in ("qwen3", "llama3_training"))]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": messages(draw)} for _ in range(3)])
    torn = ("", "{%", "%}", "{{", "}}", "{#", "endif", " | nothing", "[99]", ".x.y", "{% break %}")
    for number in range(90):
        text = draw.choice(known)
        at = draw.randrange(len(text))
        template = text[:at] + draw.choice(torn) + text[at + draw.choice((0, 1, 7, 40)) :]
        folder = write_tokenizer(tmp_path / f"tokenizer{number}", "qwen", template)
        try:
            prepared(tmp_path / f"out{number}", [lines], folder)
        except RunError as error:
            sentences[template] = str(error)
    assert len(sentences) >= 40
    assert not [said for said in sentences.values() if not 10 < len(said) < 600 or "\n" in said]


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokenizers_that_cannot_be_used_are_told(settings: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", "qwen", CHATML)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(settings)
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": messages(Random(1))}])
    with pytest.raises(RunError, match=SETTINGS[settings]) as refused:
        prepared(tmp_path / "out", [lines], folder)
    assert "\n" not in str(refused.value)


def mutant(draw: Random, line: str) -> str:
    """A line that has a value too many, too few or of another kind, or is cut or torn."""
    if draw.random() < 0.2:
        at = draw.randrange(1, len(line))
        return draw.choice((line[:at], line[at:], line[:at] + draw.choice('"{}[],:\\') + line[at:]))
    record = json.loads(line)
    for _ in range(draw.randint(1, 3)):
        places = list(places_in(record))
        if not places:
            break
        holder, key = draw.choice(places)
        other = draw.choice(
            (None, 3, -1.5e308, True, "", "assistant", "\ud800", [], {}, [[]], [{}])
        )
        kind = draw.choice(("put", "drop", "wrap", "again"))
        if kind == "drop":
            del holder[key]
        elif kind == "again" and isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            holder[key] = [holder[key]] if kind == "wrap" else other
    return json.dumps(record)


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value within, by what holds it."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in list(keys):
        yield value, key
        yield from places_in(value[key])


def test_whatever_a_line_holds_it_is_prepared_or_counted_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "qwen", "qwen", template_of_trl("qwen3"))
    draw, reasons, count = Random(9), list[str](), Tally.add_bad
    made = forms(draw, 40, thinks=True, calls=True)
    made["tools"] = [{"messages": messages(draw, calls=True), "tools": TOOLS} for _ in range(20)]
    good = [json.dumps(record) for rows in made.values() for record in rows]
    lines = [each for line in good for each in (line, mutant(draw, line))]
    assert not any("\n" in line for line in lines)
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def noted(tally: Tally, offset: int, reason: str) -> None:
        reasons.append(reason)
        count(tally, offset, reason)

    monkeypatch.setattr(Tally, "add_bad", noted)
    index = prepared(tmp_path / "out", [tmp_path / "a.jsonl"], folder, max_bad_share=0.5).index
    assert sum(shard.bad_lines for shard in index.shards) == len(reasons) >= 60
    assert index.documents >= len(good)
    assert len({re.sub(r"\d+|\(.*\)", "", reason) for reason in reasons}) >= 12
    assert not [reason for reason in reasons if not 10 < len(reason) < 400 or "\n" in reason]


def pairs(draw: Random, count: int) -> dict[str, list[Record]]:
    """Preferences in every form that people have them in."""
    made: dict[str, list[Record]] = {"chats": [], "whole": [], "texts": [], "joined": []}
    for _ in range(count):
        *prompt, last = messages(draw)[: draw.choice((2, 4))]
        prompt = [*prompt, last] if last["role"] == "user" else prompt
        answers = {key: [{"role": "assistant", "content": f"{key} {text(draw)}"}] for key in _SIDES}
        made["chats"].append({"prompt": prompt, **answers})
        made["whole"].append({key: [*prompt, *answers[key]] for key in _SIDES})
        texts = {key: f" {key} {text(draw)}" for key in _SIDES}
        made["texts"].append({"prompt": text(draw), **texts})
        asked = text(draw)
        made["joined"].append({key: asked + texts[key] for key in _SIDES})
    return made


_SIDES = ("chosen", "rejected")


def pairs_by_trl(folder: Path, records: list[Record]) -> list[Learned]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig
    from trl.data_utils import maybe_extract_prompt
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}
    arguments = DPOConfig(str(folder / "out"), max_length=None, **options)
    dataset = Dataset.from_list([maybe_extract_prompt(record) for record in records])
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    found = []
    for row in DPOTrainer._prepare_dataset(trainer, dataset, tokenizer, arguments, "train"):
        for key in _SIDES:
            answer = row[f"{key}_ids"]
            learned = [False] * len(row["prompt_ids"]) + [True] * len(answer)
            found.append((row["prompt_ids"] + answer, learned))
    return found


def test_pairs_are_those_of_trl_and_stay_together(tmp_path: Path, tokenizer: Path) -> None:
    made = pairs(Random(7), 50)
    files = [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in made.items()]
    out, options = tmp_path / "out", {"tokenizer": str(tokenizer), "kind": "preferences"}
    index = prepare(out, files, seq_len=1024, **options).index
    expected = [each for rows in made.values() for each in pairs_by_trl(tokenizer, rows)]
    assert index.documents == len(expected) == 400
    wanted = sorted(zip(expected[::2], expected[1::2], strict=True))
    found = []
    for batch in eval_batches(
        Corpus.open(out), seq_len=1024, global_batch_size=2, micro_batch_size=2, max_batches=999
    ):
        for tokens, targets, numbers in (row for m in batch for row in zip(*m, strict=True)):
            parts = [tokens[numbers == n].tolist() for n in numbers.unique() if n >= 0]
            counts = [(targets[numbers == n] != IGNORE).tolist() for n in numbers.unique()]
            # A target is what follows: of the last token, nothing.
            alone = [(p, [False, *c[:-1]]) for p, c in zip(parts, counts, strict=False)]
            found += list(zip(alone[::2], alone[1::2], strict=False))
    assert sorted(found) == wanted
    short = prepare(tmp_path / "short", files, seq_len=128, **options).index
    left_out = sum(shard.left_out for shard in short.shards)
    assert left_out == 2 * sum(len(a[0]) + len(b[0]) > 128 for a, b in wanted) > 0
    assert short.documents == 400 - left_out


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "a"}, 'no "rejected"'),
        ({"prompt": "a", "completion": "b"}, 'no "chosen"'),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "its chosen is a text, and its prompt is"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, '"chosen" is not a list of messages'),
        ({"chosen": [], "rejected": []}, '"chosen" is not a list of messages'),
        ({key: [{"role": "user", "content": key}] for key in _SIDES}, "do not begin alike"),
        ({key: [{"role": "user", "content": "a"}] for key in _SIDES}, "end in other answers"),
        (
            {"chosen": [{"role": 1}], "rejected": [{"role": "user"}]},
            'message 1 of chosen has no "ro',
        ),
    ],
)
def test_what_is_no_pair_is_told(
    record: Record, reason: str, tmp_path: Path, tokenizer: Path
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [record])
    with pytest.raises(DataError, match=reason) as refused:
        prepare(tmp_path / "out", [lines], tokenizer=str(tokenizer), kind="preferences", seq_len=64)
    assert "\n" not in str(refused.value)


def test_what_does_not_fit_a_run_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": messages(Random(1))}])
    chats = prepared(tmp_path / "chats", [lines], tokenizer, 64).index
    made = pairs(Random(1), 1)["chats"]
    both = write_lines(tmp_path / "b.jsonl", made)
    options = {"tokenizer": str(tokenizer), "seq_len": 1024}
    preferences = prepare(tmp_path / "pairs", [both], kind="preferences", **options).index
    (tmp_path / "a.txt").write_text("the other thing " * 40)
    plain = str(tokenizer / "tokenizer.json")
    text = prepare(tmp_path / "text", [tmp_path / "a.txt"], tokenizer=plain, eot="<|im_end|>").index

    def config(seq_len: int, **model: Any) -> Config:
        sizes = {"train": {"seq_len": seq_len}, "data": {"dataset_path": "chats"}}
        return Config.model_validate({**sizes, "model": {"vocab_size": 999, **model}})

    check_samples(config(64), chats)
    with pytest.raises(DataError, match=r"rows of 64 tokens.*set train\.seq_len=64, or prepare"):
        check_samples(config(65), chats)
    with pytest.raises(DataError, match=r"holds chats, which a model of model\.factory"):
        check_samples(config(64, factory="ours:build"), chats)
    with pytest.raises(DataError, match="holds preferences, of which the loss"):
        check_samples(config(1024), preferences)
    assert check_compatible(chats, text, 64) is None
    assert check_compatible(text, chats, 64) is None
    assert "rows of 64 tokens" in (check_compatible(text, chats, 32) or "")
    assert "holds preferences" in (check_compatible(chats, preferences, 64) or "")
    assert "it holds text" in (check_compatible(preferences, text, 1024) or "")
    assert check_compatible(preferences, preferences, 1024) is None
    assert not {"kind", "seq_len", "template"} & json.loads(text.to_bytes()).keys()
