"""Small tokenizers with the special tokens and chat templates of real models, and chats for them.

Their tokens are bytes, some pairs of bytes, and the special tokens of the model that they are named
for; the templates are those that TRL ships.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kempner.data.files.chat_template import ChatTemplate
from kempner.data.files.text import _byte_characters
from kempner.data.prepare.chats import documents_of, read_chat

Record = dict[str, Any]

SPECIAL = {
    "llama3": {
        "tokens": [
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ],
        "config": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    },
    "qwen": {
        "tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "plain": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"],
        "config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    },
}
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def template_of_trl(name: str) -> str:
    """A template in TRL's package, such as `qwen3_training`."""
    trl = find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def write_tokenizer(folder: Path, family: str, template: str) -> Path:
    """A folder as a model's on the Hub: tokenizer.json, tokenizer_config.json and the template."""
    made, vocabulary = SPECIAL[family], {c: n for n, c in enumerate(_byte_characters())}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n"), ("e", "r")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(made["tokens"]))
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in made.get("plain", [])])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **made["config"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


_WORDS = [
    *("the", "other", "thing", "in", "question", "and", "then", "some", "7", "è", "日本"),
    *("\N{ROCKET}", "<b>", "{{x}}", "\t\n\n"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how it is.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def text(draw: Random, most: int = 12) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, most)))


def messages(draw: Random, *, thinks: bool = False, calls: bool = False) -> list[Record]:
    """A chat of one to four turns, with a system message or not, that ends with an answer or, at
    times, with a question. `thinks` is whether answers have thoughts, `calls` whether some of them
    call a tool."""
    chat = [{"role": "system", "content": text(draw)}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        chat.append({"role": "user", "content": text(draw)})
        if calls and draw.random() < 0.5:
            call = {"name": "weather", "arguments": {"city": text(draw, 2)}}
            calling = {"type": "function", "function": call}
            chat.append({"role": "assistant", "content": "", "tool_calls": [calling]})
            chat.append({"role": "tool", "content": text(draw)})
        answer = {"role": "assistant", "content": text(draw)}
        if thinks and draw.random() < 0.5:
            answer["content"] = f"<think>\n{text(draw)}\n</think>\n\n{answer['content']}"
        chat.append(answer)
    if draw.random() < 0.1:
        chat.append({"role": "user", "content": text(draw)})
    return chat


def chat_of_half_a_row(draw: Random, template: ChatTemplate, seq_len: int) -> Record:
    """One of which two, and no more, fit into a row."""
    while True:
        asked, answered = text(draw, seq_len // 8), text(draw, seq_len // 8)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        record = {"messages": turns}
        (document,) = documents_of(read_chat(record), template)
        if seq_len // 3 < len(document.ids) <= seq_len // 2:
            return record


def forms(draw: Random, count: int, **options: bool) -> dict[str, list[Record]]:
    """`count` chats of each form that people have them in, by the form's name."""
    made: dict[str, list[Record]] = {"messages": [], "sharegpt": [], "pairs": [], "plain": []}
    for _ in range(count):
        made["messages"].append({"messages": messages(draw, **options)})
        turns = [{"from": m["role"], "value": m["content"]} for m in messages(draw)]
        made["sharegpt"].append({"conversations": turns})
        chat = messages(draw, **options)
        asked = next(n for n, message in enumerate(chat) if message["role"] == "assistant")
        made["pairs"].append({"prompt": chat[:asked], "completion": chat[asked : asked + 1]})
        made["plain"].append({"prompt": text(draw), "completion": draw.choice(" ,") + text(draw)})
    return made
