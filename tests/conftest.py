"""Fixtures for all tests."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import cost
import lengths
import patience
import promises_kept
import pytest
import pytest_timeout
import warm
from drilling import ALL
from harness import KEMPNER, Run, end_jobs, made_once, wait_until
from hypothesis import settings
from tiny_tokenizers import CHATML, forms, write_tokenizer
from warm import ending

from kempner.cluster.machine import MemoryGroup, memory_group
from kempner.run.process.signals import inbox
from kempner.supervisor.launchers.children import PR_SET_CHILD_SUBREAPER

DRILLS = Path(__file__).with_name("drills")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started with nohup, or in the background by a script, pytest ignores these, and so would every run
# that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

# The same examples in every run, and no opinion about how fast the machine is.
settings.register_profile("kempner", derandomize=True, deadline=None)
settings.load_profile("kempner")


def pytest_addoption(parser: pytest.Parser) -> None:
    lengths.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    patience.slowness()  # before there are workers: they have what is measured here
    ending.mark(config)
    promises_kept.watch(config)
    cost.watch(config)
    lengths.watch(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures are made: those that a test needs first are started as it is."""
    warm.choose(cold=item.get_closest_marker("cold") is not None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `--numprocesses=auto` is."""
    return warm.workers()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker that has died, of its time limit for one, leaves nothing."""
    if error:
        ending.end_left_over(node.gateway)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """The limits of whole tests are deadlines like all others."""
    longer = settings._replace(timeout=patience.scaled(settings.timeout))
    return bool(pytest_timeout.pytest_timeout_set_timer(item, longer))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that a test runs in this process may make it a sub-reaper, for good: what later
    tests leave behind would become its children, and never be gone. It may also have trapped the
    stop signals, and the signal of a later test would end this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    inbox().uninstall()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make check` leaves out what is marked as a drill; `make long` does only these, and all of
    `tests/drills`, of which `make check` does a part of each.
    """
    drills = {
        item
        for item in items
        if item.get_closest_marker("drill") or (ALL and DRILLS in item.path.parents)
    }
    left_out = [item for item in items if (item in drills) != ALL]
    items[:] = [item for item in items if (item in drills) == ALL]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of a session have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """A prepared corpus of about 12,000 byte tokens."""
    return made_once(shared / "corpus", prepare) / "tokens"


def prepare(folder: Path) -> None:
    words = [f"step {n} of {n * n % 977} follows {n - 1}" for n in range(460)]
    for name, part in (("a.txt", words[:200]), ("b.txt", words[200:])):
        (folder / name).write_text("\n".join(part))
    subprocess.run(
        [*KEMPNER, "prepare", "--out", folder / "tokens", folder / "a.txt", folder / "b.txt"],
        check=True,
    )


@pytest.fixture(scope="session")
def chats(shared: Path) -> tuple[str, ...]:
    """Overrides with which the tiny run learns from packed chats, of one to five in a row."""
    data = made_once(shared / "chats", prepare_chats) / "tokens"
    return f"--data.dataset_path={data}", f"--train.seq_len={CHATS_SEQ_LEN}"


CHATS_SEQ_LEN = 96


def prepare_chats(folder: Path) -> None:
    tokenizer = write_tokenizer(folder / "tokenizer", "qwen", CHATML)
    made = forms(Random(1), 60)
    lines = [json.dumps(record) for records in made.values() for record in records]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    subprocess.run(
        [
            *(*KEMPNER, "prepare", "--chats", "--tokenizer", tokenizer, "--out", folder / "tokens"),
            *("--seq-len", str(CHATS_SEQ_LEN), folder / "chats.jsonl"),
        ],
        check=True,
    )


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Iterator[Run]:
    """A tiny run; whatever it leaves running is killed."""
    run = Run(tmp_path / "a", corpus)
    yield run
    end_jobs(run)


@pytest.fixture
def reference(tmp_path: Path, corpus: Path) -> Iterator[Run]:
    """A second run, to compare with."""
    run = Run(tmp_path / "reference", corpus)
    yield run
    end_jobs(run)


@pytest.fixture(scope="session")
def undisturbed(shared: Path, corpus: Path) -> Callable[..., Run]:
    """The tiny run with these overrides, to its end, for a world of this size. To be left alone."""

    def get(world: int, *overrides: str) -> Run:
        name = re.sub(r"[^a-z0-9]+", "-", " ".join(["undisturbed", str(world), *overrides]))
        complete = lambda folder: Run(folder, corpus).complete(world, *overrides)  # noqa: E731
        return Run(made_once(shared / name, complete), corpus)

    return get


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 4 MiB: too small for two of the tiny run's checkpoints and some ballast."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[int], MemoryGroup]]:
    """Makes a real control group with a limit of bytes, below that of this process."""
    own = memory_group()
    if own is None or not os.access(own.path, os.W_OK):
        pytest.skip("a control group with a limit needs root, and cgroups that can be written to")
    group = MemoryGroup(own.path / f"{tmp_path.parent.name}-{tmp_path.name}")

    def make(limit: int) -> MemoryGroup:
        group.path.mkdir()
        files = (group.path / name for name in ("memory.max", "memory.limit_in_bytes"))
        next(file for file in files if file.exists()).write_text(str(limit))
        return group

    yield make
    if group.path.exists():
        processes = group.path / "cgroup.procs"
        wait_until(lambda: not processes.read_text(), "the group to be empty")
        group.path.rmdir()
