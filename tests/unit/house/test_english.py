"""Docstrings, comments, messages, pages and names are in standard English.

A vague subject (*somebody*) hides whether the user, a process, a rank or a node is meant. A name is
a noun of docs/glossary.md, or a verb with what it acts on.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kempner"

VAGUE = re.compile(
    r"\b(?:who(?:m|so)?ever|(?:no|some|any|every)body|(?:some|any|every)one|no one|so many)\b", re.I
)
"""Words of which a reader has to guess whom or how many they mean."""

TESTS = re.compile(r"\[[^]]*\]\(\.\./tests/[^)]*\)")
"""Names of tests, as the pages cite them."""

# From Python 3.12 on the text in an f-string is a token of its own.
STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))

OTHER_CODE = ("tests", "benchmarks", "scripts", "docs/examples")
"""Folders in which docstrings and comments are held to the same words, and texts are data."""

BEFORE_A_DOCSTRING = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
"""Tokens after which a string is a statement of its own."""

CLASSES = {
    *("Told", "Came", "Went", "Here", "Where", "Before", "Beside", "Outside", "Everything"),
    *("Own", "Doing", "Done", "Took", "Began", "Due", "Means", "Worth", "Live", "Living", "Found"),
    *("Given", "Heard", "Received", "Raised", "Registered", "Renamed", "Explained", "Converted"),
    *("Built", "Dealt", "Drawn", "Mapped", "Streamed", "Traced", "Computed", "Waited", "Needed"),
    *("Written", "Prepared", "Loaded", "Located", "Listed", "Cleared", "Confirmed", "Forked"),
}
"""Adverbs, pronouns and participles that say nothing of what such an object is."""

FUNCTIONS = {
    *("be_rid_of", "bury", "of_stranger", "let_go", "say_goodbye", "goodbye", "nap", "play"),
    *("stay_deaf", "born_deaf", "fall_silent", "stay_out_of_queue", "go_elsewhere", "ailments"),
    *("see_it_through", "see_it_end", "whom_to_ask", "who_failed", "who_waits", "odd_ones"),
}
"""Names that were jokes, or that leave out what is done to what."""

VARIABLES = {"told", "came", "said"}
"""Verbs that say how a value has come to a place, and not what it is."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def other_modules() -> list[Path]:
    """Those of `OTHER_CODE`, without this one, which quotes the words."""
    found = (path for folder in OTHER_CODE for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path != Path(__file__))


def vague_words(text: str, messages: bool = True) -> Iterator[tuple[int, str]]:
    """The lines of a module whose docstring, comment or message has a vague word, and that word.

    Without `messages`, strings within statements are left out.
    """
    if VAGUE.search(text) is None:  # most have none, and tokens take long
        return
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        string = token.type in STRINGS
        data = string and before not in BEFORE_A_DOCSTRING
        if token.type == tokenize.COMMENT or (string and (messages or not data)):
            for nth, line in enumerate(token.string.split("\n")):
                for found in VAGUE.finditer(line):
                    yield token.start[0] + nth, found[0]
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def odd_names(text: str) -> Iterator[tuple[int, str]]:
    """The lines that define a class or function with a name that is not to be used."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in CLASSES:
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in FUNCTIONS | VARIABLES:
            yield node.lineno, node.name
        if isinstance(node, ast.Name) and node.id in VARIABLES:
            yield node.lineno, node.id
        if isinstance(node, ast.arg) and node.arg in VARIABLES:
            yield node.lineno, node.arg


def test_no_sentence_has_a_vague_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}: name the user, process, rank or node that is "
        "meant, or the number"
        for path in modules()
        for line, word in vague_words(path.read_text())
    ]
    assert found == []


def test_no_docstring_or_comment_beside_the_package_has_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in other_modules()
        for line, word in vague_words(path.read_text(), messages=False)
    ]
    assert found == []


def test_no_page_has_one_either() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lines = [(page, line) for page in pages for line in page.read_text().splitlines()]
    found = [
        f"{page.relative_to(ROOT)}: {word[0]}: {line[:60]}"
        for page, line in lines
        for word in VAGUE.finditer(TESTS.sub("", line))
    ]
    assert found == []


def test_no_name_is_a_participle_or_a_joke() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: a noun of docs/glossary.md, or a verb and noun"
        for path in modules()
        for line, name in odd_names(path.read_text())
    ]
    assert found == []


MODULE = '''"""For whoever looks."""

MESSAGE = f"of somebody's {len('')}"


class _Came:
    """After so many steps
    nobody waits."""

    def _bury(self) -> None:
        pass  # Someone else does it.
'''


def test_a_vague_word_is_found_in_docstrings_messages_and_comments() -> None:
    words = [(1, "whoever"), (3, "somebody"), (7, "so many"), (8, "nobody"), (11, "Someone")]
    assert [*vague_words(MODULE)] == words
    assert [*vague_words(MODULE, messages=False)] == [words[0], *words[2:]]


@pytest.mark.parametrize("text", ["somebody = 1", '"""A user; the body of a message."""'])
def test_other_text_has_no_vague_word(text: str) -> None:
    assert [*vague_words(text)] == []


def test_a_name_that_is_not_to_be_used_is_found() -> None:
    assert sorted(odd_names(MODULE)) == [(6, "_Came"), (10, "_bury")]
