"""The console blocks of the pages, and a reader who types what stands there, word by word."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from harness import wait_until
from patience import scaled
from terminal import CTRL_C, Terminal

_BLOCK = re.compile(r"^```(?:console|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TO_DO = re.compile(
    r"\]\((?P<link>examples/[\w.]+)\)"
    r"|(?P<mark>^<!-- walk: on a cluster -->\n)?^```console\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_BAR = re.compile(r"[━╺╸]+")
_NUMBER = re.compile(r"\d[\d,.:]*")
_COMMENT = re.compile(r"\s+#.*")
_PRESSED = "^C"


@dataclass(frozen=True)
class Command:
    """A command of a block, and the lines that stand below it."""

    text: str
    shown: tuple[str, ...]
    on_cluster: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it is left training: the last that is shown of it is its progress."""
        return bool(self.shown) and _BAR.search(self.shown[-1]) is not None


@dataclass(frozen=True)
class Block:
    """A console block: the page that it stands on, and what is typed."""

    page: str
    commands: tuple[Command, ...]

    @property
    def name(self) -> str:
        """By which a list can name it: its page and its first command, without a comment."""
        return f"{self.page}: {_COMMENT.sub('', self.commands[0].text)}"


def blocks_of(page: Path, name: str) -> list[Block]:
    """All console blocks of a page, in their order."""
    return [Block(name, tuple(_commands(text))) for text in _BLOCK.findall(page.read_text())]


def to_do(page: str) -> list[Path | Command]:
    """What a page asks of its reader, in order: files to save, by links to its examples, and
    commands to type; `<!-- walk: on a cluster -->` above a block says where.
    """
    found: list[Path | Command] = []
    for part in _TO_DO.finditer(page):
        if part["link"]:
            found.append(Path(part["link"]))
        else:
            on_cluster = part["mark"] is not None
            found += [replace(c, on_cluster=on_cluster) for c in _commands(part["block"])]
    return found


def _commands(text: str) -> Iterator[Command]:
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    if not starts:  # a piece of a script
        yield Command(text.strip(), ())
        return
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield Command(lines[start].removeprefix("$ "), tuple(lines[start + 1 : end]))


def form(line: str) -> str:
    """A line without what is another one in every run: numbers, and how long a bar is."""
    return " ".join(_NUMBER.sub("#", _BAR.sub(" ", line)).split())


class Reader:
    """Types blocks into a terminal, in a folder, and compares what is shown with what stands there.

    `waiting` is for how many seconds each thing that should be shown is waited for.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], waiting: float = 200.0) -> None:
        self.folder, self._waiting = folder, waiting
        self.environ = {**environ, "PYTHONFAULTHANDLER": "1"}

    def type(self, command: Command) -> Terminal | None:
        """Type a command; it must show what stands below it, and end well. The terminal, for those
        that need one.
        """
        if command.text.startswith("cd "):
            self.folder = (self.folder / command.text.split()[1]).resolve()
            return None
        terminal = self.open(command)
        try:
            stopped = self._see(terminal, command)
            self._await(terminal, terminal.has_ended, f"the end of {command.text}")
            code, expected = terminal.shell.returncode, 75 if stopped else 0
            what = f"{command.text} ended with {code}, not {expected}"
            assert code == expected, "\n".join([what, *terminal.lines()])
        finally:
            terminal.end()
        return terminal

    def open(self, command: Command) -> Terminal:
        return Terminal.open(command.text, self.folder, self.environ)

    def _see(self, terminal: Terminal, command: Command) -> bool:
        """Follow what is shown, and press Ctrl-C where that is done; whether it was."""
        seen = 0
        for line in command.shown:
            if line == _PRESSED:
                terminal.type(CTRL_C)
                continue
            wanted = form(line)

            def shown(wanted: str = wanted, after: int = seen) -> int:
                lines = enumerate(terminal.lines()[after:], after + 1)
                # What the supervisor says may stand behind the bar that a rank has drawn.
                return next((n for n, one in lines if form(one).endswith(wanted)), 0)

            seen = self._await(terminal, shown, f"{wanted!r} after {command.text}")
        if command.goes_on:
            terminal.type(CTRL_C)
        return command.goes_on or _PRESSED in command.shown

    def _await(self, terminal: Terminal, condition: object, what: str) -> int:
        assert callable(condition)
        try:
            return int(wait_until(condition, what, self._waiting, interval=0.02))
        except AssertionError as error:
            stacks = self._stacks(terminal)
            raise AssertionError("\n".join([str(error), *terminal.lines(), *stacks])) from None

    def _stacks(self, terminal: Terminal) -> list[str]:
        """Have all Python processes of a command print where they stand, which ends them; what they
        have printed elsewhere than here.
        """
        if terminal.shell.poll() is None:
            processes = psutil.Process(terminal.shell.pid).children(recursive=True)
            for process in reversed(processes):  # the ranks first: the supervisor's end ends them
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGABRT)
            psutil.wait_procs(processes, timeout=scaled(5))
        outputs = sorted(self.folder.glob("runs/*/attempts/*/*.out"))
        return [line for path in outputs for line in [str(path), path.read_text(errors="replace")]]
