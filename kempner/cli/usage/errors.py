"""Sentences about a wrong command line: what is wrong, and what was probably meant.

typer does not export the classes of its errors, so they are told apart by their names and fields.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from kempner.config.errors import DEMANDS, quote, shorten

_MEANT = {
    **dict.fromkeys(("run", "start", "launch", "resume", "restart", "continue"), "supervise"),
    **dict.fromkeys(("ls", "list", "checkpoints"), "checkpoint list"),
    **dict.fromkeys(("ps", "show", "info"), "status"),
    **dict.fromkeys(("log", "tail", "output"), "logs"),
    **dict.fromkeys(("kill", "cancel", "end", "abort"), "stop"),
    **dict.fromkeys(("evaluate", "validate", "perplexity"), "eval"),
}
"""Commands of other tools, and the one of ours that does the same."""

_MOVED = {"experts": "kempner plan MODEL --world N"}
"""Commands of earlier versions, and what has taken their place."""

_PARSING = {
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of at most 64 bits",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
"""What pydantic's error types for text from a command line demand, beside those for TOML."""


def help_asked_for(error: Any, arguments: Sequence[str]) -> str | None:
    """The help of a group of commands that was called without one; None for a mistake."""
    context, kind = getattr(error, "ctx", None), type(error).__name__
    if kind != "UsageError" or context is None or not _is_group(context.command):
        return None
    return None if _words_given(context, arguments) else str(context.get_help())


def explain(error: Any, arguments: Sequence[str]) -> str:
    """A clause about one of typer's errors, in our words; `arguments` are those of the process."""
    context, kind = getattr(error, "ctx", None), type(error).__name__
    match kind:
        case "NoSuchOption":
            known = list(error.possibilities or ())
            return unknown_option(error.option_name, known)
        case "MissingParameter":
            return f"{_name(error.param)} is missing{_meaning(error.param)}"
        case "BadOptionUsage":
            surplus = any(word.startswith(f"{error.option_name}=") for word in arguments)
            return f"{error.option_name} {'takes no' if surplus else 'needs a'} value"
        case "BadParameter" if error.param is not None:
            return _bad_value(error)
        case "UsageError" if context is not None and _is_group(context.command):
            return _no_such_command(context, arguments)
        case "UsageError" if found := re.search(r"unexpected extra .*\((.*)\)$", error.message):
            return f"too many arguments: {shorten(found[1])}"
    return str(error.format_message()).rstrip(".")


def unknown_option(name: str, known: Sequence[str]) -> str:
    """A clause about an option that there is not; `known` are those to suggest from."""
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"unknown option {shorten(name)}" + (f"; did you mean {near[0]}?" if near else "")


def _bad_value(error: Any) -> str:
    """One of pydantic's errors about an option or an argument."""
    name = _name(error.param)
    cause = error.__cause__
    if cause is None or not hasattr(cause, "errors"):
        return f"{name}: {error.message.rstrip('.')}"
    details = cause.errors(include_url=False)[0]
    value, context = details["input"], details.get("ctx", {})
    choices = getattr(getattr(error.param, "type_descriptor", None), "choices", None)
    if choices:
        names = [str(getattr(choice, "value", choice)) for choice in choices]
        near = get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        return f"{name} must be {listed}, not {quote(value)}{hint}"
    bounds = {name: f"{x:g}" if isinstance(x, float) else x for name, x in context.items()}
    demand = (_PARSING.get(details["type"]) or DEMANDS.get(details["type"], "")).format(**bounds)
    shown = quote(value) if details["type"] in _PARSING else shorten(str(value))
    return f"{name} {demand}, not {shown}" if demand else f"{name} cannot be {quote(value)}"


def _no_such_command(context: Any, arguments: Sequence[str]) -> str:
    path, typed = context.command_path, _words_given(context, arguments)[0]
    names = list(context.command.list_commands(context))
    if typed in _MOVED and " " not in path:
        return f"{path} {typed} is part of another command now: {_MOVED[typed]}"
    below = _commands_below(context, names)
    near = get_close_matches(typed, names, n=1)
    if " " not in path:
        exact = [meant for meant in (_MEANT.get(typed), below.get(typed)) if meant]
        near = exact[:1] or near or [below[name] for name in get_close_matches(typed, below, n=1)]
    hint = f"; did you mean {' or '.join(f'{path} {name}' for name in near)}?" if near else ""
    all_names = "" if near else f"; the commands are {', '.join(names)}"
    return f"there is no {path} {shorten(typed)}{hint}{all_names}"


def _commands_below(context: Any, names: Sequence[str]) -> dict[str, str]:
    """The commands below those of these names, by their last word."""
    return {
        inner: f"{name} {inner}"
        for name in names
        for inner in getattr(context.command.get_command(context, name), "commands", {})
    }


def _words_given(context: Any, arguments: Sequence[str]) -> Sequence[str]:
    """What was given to a group, its command first: groups have no options of their own."""
    return arguments[context.command_path.count(" ") :]


def _is_group(command: Any) -> bool:
    return hasattr(command, "list_commands")


def _name(parameter: Any) -> str:
    """An option or an argument as the help calls it."""
    option = next((name for name in parameter.opts if name.startswith("-")), None)
    return str(option or (parameter.metavar or parameter.name.upper()).replace("[STEP]", "STEP"))


def _meaning(parameter: Any) -> str:
    text = (getattr(parameter, "help", None) or "").partition(". ")[0].rstrip(".")
    return f": {text[:1].lower()}{text[1:]}" if text else ""
