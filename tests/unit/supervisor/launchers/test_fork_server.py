"""The fork server: what it forks, what it refuses, and what happens when it dies or hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import drills, wait_until
from patience import scaled

from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import (
    PR_SET_CHILD_SUBREAPER,
    ChildRank,
    Children,
    Family,
)
from kempner.supervisor.launchers.fork_server import client
from kempner.supervisor.launchers.fork_server.client import CannotForkError, ForkServerClient
from kempner.supervisor.launchers.fork_server.server import (
    ForkOrder,
    ForkRefused,
    ProcessEnded,
    ProcessForked,
    ServerReady,
    arguments_of_python,
    decode,
    encode,
    why_not_to_fork,
)
from kempner.supervisor.policy.outcome import RankExit

PROGRAM = """
import json, os, random, signal, sys
import numpy
print(json.dumps({
    "argv": sys.argv, "name": __name__, "comm": open("/proc/self/comm").read().strip(),
    "path": sys.path[0], "said": os.environ.get("SAID"),
    "thread_limit": os.environ.get("OPENBLAS_NUM_THREADS"), "session": os.getsid(0) == os.getpid(),
    "stdin": os.read(0, 1).decode(), "drawn": [random.random(), float(numpy.random.rand())],
    "blocked": sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes fork servers, in a process that is a sub-reaper until the end of the test."""
    Family()
    made: list[ForkServerClient] = []

    def make(*modules: str) -> ForkServerClient:
        made.append(ForkServerClient(modules))
        made[-1].start()
        return made[-1]

    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}")
    yield make
    for server in made:
        server.close()
    # Or what later tests leave behind would never be reaped, and it would seem to run.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def sleeper(folder: Path, seconds: float = 100.0) -> list[str]:
    (folder / "sleeper.py").write_text(f"import time\ntime.sleep({seconds})\n")
    return [sys.executable, str(folder / "sleeper.py")]


@pytest.mark.parametrize(
    "message",
    [
        ForkOrder(3, ("-m", "kempner"), {"A": "b", "odd": "\udce9"}, True),
        ServerReady(),
        ProcessForked(3, 77),
        ForkRefused(3, "no"),
        ProcessEnded(77, -9),
    ],
)
def test_messages_arrive_as_they_were(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ([sys.executable, "-m", "kempner", "train"], ("-m", "kempner", "train")),
        ([sys.executable, "train.py", "--lr=1"], ("train.py", "--lr=1")),
        ([sys.executable, "-u", "train.py"], None),
        ([sys.executable, "-m"], None),
        ([sys.executable], None),
        (["bash", "train.sh"], None),
        (["/no/such/python", "train.py"], None),
        (["torchrun", "train.py"], None),
    ],
)
def test_only_a_program_for_this_python_is_forked(command: list[str], arguments: Any) -> None:
    assert arguments_of_python(command) == arguments


def test_a_program_that_is_not_forked_still_finds_its_place() -> None:
    """Under Slurm, or where a fork is not safe."""
    plain, forking = (
        Program.of_user(["python", "x.py"]),
        Program.of_user(["python", "x.py"], ["os"]),
    )
    assert forking.command == ("python", "x.py")
    assert forking.cold == plain.cold == plain.command
    assert "exec_rank" in " ".join(forking.cold)


def test_a_forked_program_is_as_if_python_had_been_started(tmp_path: Path, server: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    forks = server("numpy", "json")
    told = []
    for number in (3, 0):
        with open(tmp_path / "out", "wb") as output:
            command = [sys.executable, str(tmp_path / "program.py"), str(number)]
            child = forks.fork(
                command, {"SAID": "yes", "RANK": "7"}, (output.fileno(),) * 2, ours=bool(number)
            )
        assert child.wait() == number
        told.append(eval((tmp_path / "out").read_text().replace("null", "None"), {"true": True}))
    deaf, plain = told
    assert deaf["argv"] == [str(tmp_path / "program.py"), "3"]
    assert (deaf["name"], deaf["path"], deaf["said"]) == ("__main__", str(tmp_path), "yes")
    assert (deaf["thread_limit"], deaf["session"], deaf["stdin"]) == (None, True, "")
    assert deaf["comm"] == "rank 7"
    assert deaf["drawn"][0] != plain["drawn"][0]
    assert deaf["drawn"][1] != plain["drawn"][1]
    assert signal.SIGTERM in deaf["blocked"]
    assert plain["blocked"] == []
    assert deaf["descriptors"] == [0, 1, 2]


def test_a_module_is_run_by_its_name(tmp_path: Path, server: Any) -> None:
    with open(tmp_path / "out", "wb") as output:
        command = [sys.executable, "-m", "kempner", "--version"]
        child = server("kempner.cli.entry").fork(
            command, os.environ, (output.fileno(),) * 2, ours=True
        )
    assert child.wait() == 0
    assert (tmp_path / "out").read_text().startswith("kempner ")


def test_an_exception_ends_a_forked_program_as_any_other(tmp_path: Path, server: Any) -> None:
    (tmp_path / "fails.py").write_text("import atexit\natexit.register(print, 'bye')\n1 / 0\n")
    with open(tmp_path / "out", "wb") as output:
        command = [sys.executable, str(tmp_path / "fails.py")]
        child = server().fork(command, os.environ, (output.fileno(),) * 2, ours=False)
    assert child.wait() == 1
    assert "ZeroDivisionError" in (tmp_path / "out").read_text()
    assert "bye" in (tmp_path / "out").read_text()


def test_whom_a_dead_server_has_forked_lives_on_and_its_end_is_known(
    tmp_path: Path, server: Any
) -> None:
    forks = server()
    child = forks.fork(sleeper(tmp_path), os.environ, (), ours=True)
    dead = forks.pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: forks.pid is None, "the end to be noticed")
    assert psutil.Process(child.pid).ppid() == os.getpid()
    with pytest.raises(CannotForkError, match="there is no fork server"):
        forks.fork(sleeper(tmp_path), os.environ, (), ours=True)
    os.kill(child.pid, signal.SIGINT)  # blocked, as its program is one of ours
    os.kill(child.pid, signal.SIGUSR1)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    forks.start()
    again = forks.fork(sleeper(tmp_path, 0.0), os.environ, (), ours=True)
    assert again.wait() == 0


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(100)
"""


def test_a_program_of_the_users_is_not_told_to_stop_by_the_death_of_the_server(
    tmp_path: Path, server: Any
) -> None:
    """It would save, leave with 0, and pass for complete."""
    (tmp_path / "saves.py").write_text(SAVES)
    forks, out = server(), tmp_path / "out"
    with open(out, "wb") as output:
        command = [sys.executable, str(tmp_path / "saves.py")]
        child = forks.fork(command, os.environ, (output.fileno(),) * 2, ours=False)
    wait_until(lambda: "ready" in out.read_text(), "it to trap the signal")
    os.kill(forks.pid, signal.SIGKILL)
    wait_until(lambda: forks.pid is None, "the end to be noticed")
    assert child.poll() is None
    os.kill(child.pid, signal.SIGUSR1)
    wait_until(lambda: child.poll() is not None, "its end")
    assert (child.poll(), child.wait()) == (3, 3)


SUPERVISOR = """
import os, sys, time
from kempner.supervisor.launchers.children import Family
from kempner.supervisor.launchers.fork_server.client import ForkServerClient
Family()
forks = ForkServerClient(())
forks.start()
print(forks.fork([sys.executable, sys.argv[1]], os.environ, (), ours=False).pid, flush=True)
time.sleep(100)
"""


def test_a_program_of_the_users_is_told_to_stop_by_the_death_of_the_supervisor(
    tmp_path: Path,
) -> None:
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    command = [sys.executable, str(tmp_path / "supervisor.py"), sleeper(tmp_path)[1]]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    rank = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    rank.wait(scaled(20))


def test_a_server_that_does_not_answer_is_replaced(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = server()
    forks.fork(sleeper(tmp_path, 0.0), os.environ, (), ours=True).wait()
    monkeypatch.setattr(client, "FORKED_WITHIN", 0.2)
    stopped = forks.pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(CannotForkError, match="does not answer"):
        forks.fork(sleeper(tmp_path), os.environ, (), ours=True)
    monkeypatch.undo()
    wait_until(lambda: forks.pid is None, "the stopped one to be gone")
    assert not psutil.pid_exists(stopped)
    forks.start()
    assert forks.fork(sleeper(tmp_path, 0.0), os.environ, (), ours=True).wait() == 0


@pytest.mark.parametrize(
    ("module", "patch", "refusal"),
    [
        ("import time\ntime.sleep(100)", ("IMPORTED_WITHIN", 0.2), "does not answer"),
        ("raise RuntimeError", ("IMPORTED_WITHIN", 60.0), "has ended"),
        (
            "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()",
            ("IMPORTED_WITHIN", 60.0),
            "2 threads run",
        ),
    ],
)
def test_what_a_module_does_may_forbid_every_fork(
    tmp_path: Path,
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    patch: tuple[str, float],
    refusal: str,
) -> None:
    (tmp_path / "spoils.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(client, *patch)
    with pytest.raises(CannotForkError, match=refusal):
        server("spoils").fork(sleeper(tmp_path), os.environ, (), ours=True)


def test_an_open_gpu_forbids_every_fork(tmp_path: Path) -> None:
    for folder in ("task/1", "fd"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    assert not why_not_to_fork(tmp_path)
    (tmp_path / "fd" / "7").symlink_to("/dev/nvidia0")
    assert why_not_to_fork(tmp_path) == "the fork server has opened /dev/nvidia0"


def test_a_stop_need_not_wait_for_the_imports(tmp_path: Path, server: Any) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)")
    os.environ["PYTHONPATH"] += f":{tmp_path}"
    forks, refused = server("slow"), []

    def order() -> None:
        try:
            forks.fork(sleeper(tmp_path), os.environ, (), ours=True)
        except CannotForkError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=order)
    waiting.start()
    wait_until(lambda: forks._running.waited_for, "the order to be sent")
    forks.cancel_forks()
    waiting.join(scaled(20))
    assert refused == ["the fork server has ended"]


@pytest.mark.parametrize(
    ("ask", "status"), [(Children.ask_to_stop, 75), (Children.kill, -signal.SIGKILL)]
)
def test_a_rank_that_is_not_forked_yet_ends_as_it_was_told_to(
    tmp_path: Path, server: Any, ask: Callable[[Children], None], status: int
) -> None:
    """One that is killed in a hang has not stopped: the run would be requeued for no reason."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)")
    os.environ["PYTHONPATH"] += f":{tmp_path}"
    program, ends = Program.of_user(sleeper(tmp_path), ["slow"]), list[RankExit]()
    children = Children()
    children.prepare(program)
    children.start(ChildRank(0, dict(os.environ), tmp_path / "out"), program, ends.append)
    forks = children._server
    assert forks is not None
    wait_until(lambda: forks._running.waited_for, "the order to be sent")  # type: ignore[union-attr]
    ask(children)
    wait_until(lambda: ends, "its end")
    assert ends == [RankExit(0, status, ended_by_us=status < 0)]
    assert children.forget(20)
    children.close()


@pytest.mark.parametrize("forks", [20, *drills(2000)])
def test_many_forks_and_none_hangs(tmp_path: Path, server: Any, forks: int) -> None:
    """Each child uses torch's own threads, forward and backward: what would hang after a fork."""
    (tmp_path / "computes.py").write_text(
        "import torch\ntorch.set_num_threads(2)\n"
        "x = torch.rand(256, 256, requires_grad=True)\n(x @ x).relu().sum().backward()\n"
        "assert torch.get_num_threads() == 2\nimport os\nos._exit(0)\n"
    )
    command = [sys.executable, str(tmp_path / "computes.py")]
    forking = server("kempner.training.imports")
    for _ in range(forks):
        assert forking.fork(command, os.environ, (), ours=True).wait() == 0
