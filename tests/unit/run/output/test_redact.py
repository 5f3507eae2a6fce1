"""A log shows no secret that stands on a command line."""

from __future__ import annotations

import pytest

from kempner.run.output.logs import redacted


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--metrics.api_key=abc", "--metrics.api_key=***"),
        ("--hub-token=a=b", "--hub-token=***"),
        ("WANDB_API_KEY=abc", "WANDB_API_KEY=***"),
        ("HF_TOKEN=abc", "HF_TOKEN=***"),
        ("--token abc --steps 3", "--token *** --steps 3"),
        ("--password --steps 3", "--password --steps 3"),
        ("--x=https://me:pass@host/path", "--x=https://me:***@host/path"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "***"),
        ("--x=[ghp_abcdefghijklmnopqrstuvwxyz]", "--x=[***]"),
        # What only looks like it.
        ("--data.tokenizer=byte", "--data.tokenizer=byte"),
        ("--max_tokens=5", "--max_tokens=5"),
        ("--model.key=3", "--model.key=3"),
        ("--checkpoint.dir=s3://bucket/a:b@c", "--checkpoint.dir=s3://bucket/a:b@c"),
        ("train.py sk-short", "train.py sk-short"),
    ],
)
def test_what_is_secret_by_its_name_or_form_is_hidden(given: str, shown: str) -> None:
    assert " ".join(redacted(given.split())) == shown
