"""Words of a command line without the secrets among them, for a log that others can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:token|secret|passwd|password|passphrase|credentials?|apikey|"
    r"(?:api|access|auth|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
"""The last part of a name: `hub_token`, `HF_TOKEN`, `--api-key`, but not `tokenizer`, `max_tokens`.
"""

_SECRET_VALUE = re.compile(
    r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{12,}"
)
"""What tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS look like."""

_IN_ADDRESS = re.compile(r"(?<=://)([^/@:\s]*):([^/@\s]+)(?=@)")
"""`user:password` in a URL."""

_ASSIGNED = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)


def redacted(words: Sequence[str]) -> list[str]:
    """The same words, with `***` for what a name or a form says is secret.

    That is the value of `--x.token=VALUE`, of `API_KEY=VALUE`, and the word after `--token`.
    """
    return list(_redacted(words))


def _redacted(words: Sequence[str]) -> Iterator[str]:
    follows = False
    for word in words:
        if follows and not word.startswith("-"):
            yield HIDDEN
            follows = False
            continue
        assigned = _ASSIGNED.fullmatch(word)
        follows = word.startswith("-") and is_secret(word)
        if assigned is not None and is_secret(assigned["name"]):
            yield f"{assigned['name']}={HIDDEN}"
        else:
            yield _SECRET_VALUE.sub(HIDDEN, _IN_ADDRESS.sub(rf"\1:{HIDDEN}", word))


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None
