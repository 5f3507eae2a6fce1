"""The chat template of a tokenizer, and chats rendered by it as `transformers` does.

`transformers` compiles the template, in jinja2's sandbox, and finds the tokens that it marks by
`{% generation %}`. It is imported without torch, and only where a chat is rendered.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from kempner.data.files.index import Index
from kempner.run.process.exit_codes import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_FILE = "tokenizer_config.json"  # the template and special tokens, in a prepared directory

Message = Mapping[str, Any]  # "role", "content" and whatever else the template reads
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template, as a value. `definition` is its tokenizer.json,
    `settings` the tokenizer_config.json that a prepared directory keeps: the template, or several
    by name, and the special tokens."""

    definition: str
    settings: str

    @classmethod
    def beside(cls, path: Path) -> ChatTemplate:
        """That of a folder with a tokenizer.json, or of that file. Raises `UsageError` if there is
        none, or transformers is missing, `DataError` if it cannot be used."""
        folder = path if path.is_dir() else path.parent
        kind = _tokenizer_class()
        try:
            definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"tokenizer {path} cannot be read as {folder / 'tokenizer.json'}: name a folder "
                "with a tokenizer.json, and its chat template beside it"
            ) from error
        try:
            loaded = kind.from_pretrained(str(folder), local_files_only=True)
            settings = json.dumps(_settings(loaded), indent=2, ensure_ascii=False) + "\n"
            template = cls(definition, settings)
            same = template.open().added_tokens_decoder == loaded.added_tokens_decoder
        except UsageError as error:
            raise UsageError(f"{folder} {error}") from error
        except Exception as error:
            raise DataError(
                f"the tokenizer in {folder} cannot be used: {_first_line(error)}"
            ) from error
        if not same:
            raise DataError(
                f"{folder / CHAT_FILE} adds tokens that tokenizer.json has not: load it with "
                "transformers, and save it again with save_pretrained"
            )
        template.check()
        return template

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.settings.encode()).hexdigest()

    @property
    def end(self) -> str:
        """The token that ends an answer, of which the model learns to stop; empty if none is
        named."""
        end: str = json.loads(self.settings).get("eos_token", "")
        return end

    def open(self) -> PreTrainedTokenizerFast:
        return _opened(self)

    def check(self) -> None:
        """Raise `DataError` if the template cannot be compiled."""
        for template in _templates(self.open().chat_template):
            try:
                _render_nothing(template)
            except Exception as error:
                raise DataError(
                    f"the chat template cannot be used: {_first_line(error)}"
                ) from error

    def marks_answers(self, tools: list[Any] | None) -> bool:
        """Whether it says which tokens are an assistant's, for a chat with or without tools."""
        return bool(_MARKS.search(self.open().get_chat_template(tools=tools)))

    def ids(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        ask: bool = False,
    ) -> list[int]:
        """The tokens of a chat; with `ask` up to where the assistant's answer begins. `options` are
        further variables of the template. Raises `ValueError`, a clause, if it refuses the chat."""
        ids: list[int] = self._rendered(messages, tools, options, ask=ask)["input_ids"]
        return ids

    def marked_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a chat, and which of them the template marks as an assistant's. Raises
        `ValueError` as `ids`."""
        rendered = self._rendered(messages, tools, options, marks=True)
        return rendered["input_ids"], [bool(each) for each in rendered["assistant_masks"]]

    def plain_ids(self, text: str) -> list[int]:
        """The tokens of a text without a template, with those that the tokenizer puts around it."""
        try:
            ids: list[int] = self.open()(text=text)["input_ids"]
        except TypeError as error:  # of the tokenizer
            raise ValueError("it has half a surrogate pair, which is not text") from error
        return ids

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        options: Mapping[str, Any] | None,
        *,
        ask: bool = False,
        marks: bool = False,
    ) -> Any:
        render = self.open().apply_chat_template
        if own := sorted(set(options or ()) & set(inspect.signature(render).parameters)):
            raise ValueError(f"chat_template_kwargs has {own[0]}, which is no template's variable")
        try:
            return render(
                [dict(message) for message in messages],
                tools=tools,
                add_generation_prompt=ask,
                return_assistant_tokens_mask=marks,
                return_dict=True,
                **(options or {}),
            )
        except Exception as error:
            raise ValueError(f"the chat template refuses it: {_first_line(error)}") from error


def chat_template(folder: Path, index: Index, definition: str) -> ChatTemplate:
    """The template by which the chats of a prepared directory were rendered. Raises `DataError` if
    it is not there as it was."""
    path = folder / CHAT_FILE
    try:
        settings = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        settings = ""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    template = ChatTemplate(definition, settings)
    if template.fingerprint != index.template:
        raise DataError(
            f"{path} is not the chat template of the chats beside it: put the original back"
        )
    return template


def _tokenizer_class() -> type[PreTrainedTokenizerFast]:
    # Its messages about torch, which is not needed, and about long texts would be of no use.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import jinja2  # noqa: F401 - transformers names it only when it renders
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            "chats need the packages transformers and jinja2: pip install 'kempner[chats]'"
        ) from error
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return PreTrainedTokenizerFast


@lru_cache(maxsize=2)
def _opened(template: ChatTemplate) -> PreTrainedTokenizerFast:
    settings = json.loads(template.settings)
    del settings["tokenizer_class"]
    named = settings.pop("chat_template")
    if isinstance(named, list):
        named = {each["name"]: each["template"] for each in named}
    engine = tokenizers.Tokenizer.from_str(template.definition)
    engine.no_padding()
    engine.no_truncation()
    return _tokenizer_class()(tokenizer_object=engine, chat_template=named, **settings)


def _settings(loaded: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What a tokenizer_config.json must say so that the chats are rendered in the same way."""
    named: Any = loaded.chat_template
    if not named:
        raise UsageError(
            "has no chat template: put the model's chat_template.jinja beside its tokenizer.json"
        )
    for template in _templates(named):
        if not isinstance(template, str):
            raise TypeError("its chat template is no text")
    if isinstance(named, dict):
        named = [{"name": name, "template": named[name]} for name in sorted(named)]
    special = {name: str(token) for name, token in sorted(loaded.special_tokens_map.items())}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": named, **special}


def _templates(named: Any) -> list[Any]:
    return list(named.values()) if isinstance(named, dict) else [named]


def _render_nothing(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[], chat_template=template)


def _first_line(error: Exception) -> str:
    """The first line of an error's text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
