"""Questions that users ask: the page and the heading that should answer each of them are there."""

from __future__ import annotations

import re

import tomli
from harness import ROOT

QUESTIONS = tomli.loads((ROOT / "tests" / "pages" / "questions.toml").read_text())["question"]
_HEADING = re.compile(r"^#{1,4} (.*)$", re.MULTILINE)
_INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """The headings of a page, as links name them."""
    text = (ROOT / "docs" / page).read_text()
    if included := _INCLUDE.search(text):
        text = (ROOT / "docs" / included[1]).read_text()
    headings = _HEADING.findall(text)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_question_has_a_heading_that_answers_it() -> None:
    answers = [answer for question in QUESTIONS for answer in question["answers"]]
    missing = [
        answer for answer in answers if answer.split("#")[1] not in anchors(answer.split("#")[0])
    ]
    assert missing == []
    assert [question["ask"] for question in QUESTIONS if not question["answers"]] == []


def test_the_questions_are_spread_over_the_site() -> None:
    assert len(QUESTIONS) == 25
    pages = {answer.split("#")[0] for question in QUESTIONS for answer in question["answers"]}
    assert len(pages) >= 12
