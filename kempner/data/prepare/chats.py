"""Chats, in the forms that people have them, to tokens of which only answers are learned.

| keys of a line or row                        | what is learned                                |
|----------------------------------------------|------------------------------------------------|
| `messages`; `conversations` (role/content, or from/value as ShareGPT has it) | every answer   |
| `prompt` and `completion`, lists of messages | the answers in the completion                  |
| `prompt` and `completion`, texts             | the completion, and the token that ends it     |
| `chosen` and `rejected`, of preferences      | what comes behind the prompt, of both          |

`tools` and `chat_template_kwargs` go to the template. Tokens and what is learned of them are as
TRL's `SFTTrainer` has them, with `assistant_only_loss` or, for texts, `completion_only_loss`.

Where the template marks answers by `{% generation %}`, these marks count. Where it does not, an
answer is what the chat up to it has more than the question alone (the chat before, and the
template's invitation to answer); both must begin with the same tokens. A template may render an
answer in another way once the chat goes on: Qwen3's leaves out earlier thinking. Then each answer
is learned in the rendering that ends with it, as a document of its own, since the model sees no
other one when it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.data.files.chat_template import ChatTemplate, Message
from kempner.data.files.token_file import BEGINS, LEARNED

CHAT_KEYS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("tools", "chat_template_kwargs"),
)
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

Ids = list[int]


@dataclass(frozen=True)
class Chat:
    """`first` is the number of the message from which on answers are learned."""

    messages: Sequence[Message]
    first: int = 0
    tools: list[Any] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PlainPair:
    prompt: str
    completion: str


@dataclass
class Document:
    ids: Ids
    learned: list[bool]

    def cut(self, length: int) -> NDArray[np.uint32] | None:
        """Its first tokens as they are on disk, at most `length` with the flags; None if none of
        them is learned. The first one is nothing's target."""
        flagged = np.array(self.ids[:length], np.uint32)
        learned = np.array(self.learned[:length])
        learned[:1] = False
        flagged[learned] |= LEARNED
        flagged[:1] |= BEGINS
        return flagged if learned.any() else None


def read_chat(record: Mapping[str, Any]) -> Chat | PlainPair:
    """The chat of a line's object. Raises `ValueError`, a clause, if there is none in it."""
    record = {key: value for key, value in record.items() if value is not None}
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise ValueError("its completion is empty")
            return PlainPair(prompt, completion)
        before = _messages(prompt, "prompt")
        messages = [*before, *_messages(completion, "completion")]
        return Chat(messages, len(before), _tools(record), _options(record))
    for key in ("messages", "conversations"):
        if key in record:
            return Chat(_messages(record[key], key), 0, _tools(record), _options(record))
    keys = ", ".join(record) or "none"
    raise ValueError(
        f'the object has neither "messages" nor "conversations" nor "prompt" and "completion" '
        f"(it has: {keys})"
    )


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'the value of "{key}" is not a list of messages')
    return [_message(each, f"message {number} of {key}") for number, each in enumerate(value, 1)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    message = {key: each for key, each in value.items() if each is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message["role"] = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise ValueError(f'{where} has no "role"')
    if not isinstance(message.get("content", ""), str | list):
        raise ValueError(f'the "content" of {where} is neither text nor a list of parts')
    return message


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError('the text in "tools" is not JSON') from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError('the value of "tools" is not a list of objects')
    return tools


def _options(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    options = record.get("chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise ValueError('the value of "chat_template_kwargs" is not an object')
    return options


def documents_of(chat: Chat | PlainPair, template: ChatTemplate) -> list[Document]:
    """The documents to learn a chat from, usually one. Raises `ValueError`, a clause, if the
    template refuses it, there is no answer in it, or it cannot be told where one is."""
    if isinstance(chat, PlainPair):
        documents = [_plain(chat, template)]
    elif template.marks_answers(chat.tools):
        documents = [_marked(chat, template)]
    else:
        documents = _by_prefix(chat, template)
    if not any(any(document.learned) for document in documents):
        raise ValueError("there is no answer of an assistant to learn from")
    return documents


def _plain(pair: PlainPair, template: ChatTemplate) -> Document:
    ids = template.plain_ids(pair.prompt + _ended(pair.completion, template))
    return _behind(ids, template.plain_ids(pair.prompt))


def _behind(ids: Ids, before: Ids) -> Document:
    """What comes behind the tokens that both have in common is learned: a token may hold the end of
    the one and the beginning of the other."""
    common = _common(ids, before)
    return Document(ids, [at >= common for at in range(len(ids))])


def _marked(chat: Chat, template: ChatTemplate) -> Document:
    ids, learned = template.marked_ids(chat.messages, tools=chat.tools, options=chat.options)
    if not chat.first:
        return Document(ids, learned)
    question = template.ids(
        chat.messages[: chat.first], tools=chat.tools, options=chat.options, ask=True
    )
    behind = _behind(ids, question).learned
    return Document(ids, [a and b for a, b in zip(learned, behind, strict=True)])


def pair_of(record: Mapping[str, Any], template: ChatTemplate) -> list[Document]:
    """The chosen and the rejected document of a line's object, as TRL's `DPOTrainer` has them: with
    `prompt`, or with what both have in common in front. What follows the tokens that both have in
    common with the prompt is learned. Raises `ValueError`, a clause, if that is no pair."""
    record = {key: value for key, value in record.items() if value is not None}
    for key in ("chosen", "rejected"):
        if key not in record:
            raise ValueError(f'the object has no "{key}" (it has: {", ".join(record) or "none"})')
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        question, answered = _pair_of_texts(record.get("prompt"), chosen, rejected, template)
    else:
        question, answered = _pair_of_chats(record, template)
    common = min(_common(question, ids) for ids in answered)
    documents = [Document(ids, [at >= common for at in range(len(ids))]) for ids in answered]
    if not all(any(document.learned) for document in documents):
        raise ValueError("one of both answers has no token of its own behind the prompt")
    return documents


def _pair_of_texts(
    prompt: Any, chosen: str, rejected: str, template: ChatTemplate
) -> tuple[Ids, list[Ids]]:
    if prompt is None:
        at = _common(chosen, rejected)
        at -= at > 0 and chosen[at - 1] == " "  # it goes with the word behind it
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    if not isinstance(prompt, str):
        raise ValueError("its chosen is a text, and its prompt is not")
    texts = [prompt + _ended(each, template) for each in (chosen, rejected)]
    return template.plain_ids(prompt), [template.plain_ids(each) for each in texts]


def _pair_of_chats(record: Mapping[str, Any], template: ChatTemplate) -> tuple[Ids, list[Ids]]:
    sides = []
    for key in ("chosen", "rejected"):
        value = record[key]
        sides.append(_messages([value] if isinstance(value, dict) else value, key))
    before = next((key for key in ("prompt", "messages", "conversations") if key in record), None)
    if before is not None:
        prompt = _messages(record[before], before)
    else:
        at = _common(*sides)
        prompt, sides = sides[0][:at], [side[at:] for side in sides]
        if not prompt or not all(sides):
            raise ValueError("chosen and rejected do not begin alike and end in other answers")
    known: dict[str, Any] = {"tools": _tools(record), "options": _options(record)}
    answered = [template.ids([*prompt, *side], **known) for side in sides]
    return template.ids(prompt, ask=True, **known), answered


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _ended(text: str, template: ChatTemplate) -> str:
    end = template.end
    return text if not end or text.endswith(end) else text + end


def _by_prefix(chat: Chat, template: ChatTemplate) -> list[Document]:
    def ids(count: int, ask: bool = False) -> Ids:
        messages = chat.messages[:count]
        return template.ids(messages, tools=chat.tools, options=chat.options, ask=ask)

    whole = ids(len(chat.messages))
    documents = [Document(whole, [False] * len(whole))]
    for number in reversed(range(chat.first, len(chat.messages))):
        if chat.messages[number]["role"] != "assistant":
            continue
        if not number:
            raise ValueError("it begins with an answer, and the template does not mark answers")
        question, answered = ids(number, ask=True), ids(number + 1)
        if answered[: len(question)] != question:
            raise ValueError(
                f"the chat template renders the question before message {number + 1} in another "
                "way once it is answered, so that the tokens of the answer are not known"
            )
        document = documents[-1]
        if document.ids[: len(answered)] != answered:
            document = Document(answered, [False] * len(answered))
            documents.append(document)
        document.learned[len(question) : len(answered)] = [True] * (len(answered) - len(question))
    return [each for each in reversed(documents) if any(each.learned)]
