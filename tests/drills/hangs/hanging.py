"""A program that hangs, or seems to: python hanging.py FORM PHASE KIND RANK SECONDS.

FORM is how it trains: in a loop of `survive`, with a CheckpointManager `by_hand`, or `silent`, with
nothing of kempner. In PHASE, RANK (or all of them, where the ranks are to miss each other) does
what KIND says: the functions below, those of `HEALTHY` for SECONDS, the others for ever.
Lines marked as `# stands` are those at which a rank then is.
"""

import atexit
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

FORM, PHASE, KIND = sys.argv[1:4]
BAD, SECONDS = int(sys.argv[4]), float(sys.argv[5])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# What one rank does


def lock() -> None:
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()  # stands: lock


def storage() -> None:
    place = Path(tempfile.mkdtemp(), "data")
    os.mkfifo(place)
    place.read_text()  # stands: storage


def gil() -> None:
    ctypes.PyDLL(None).sleep(100_000)  # stands: gil


def regex() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # stands: regex


def retry() -> None:
    while not Path("/nowhere/at/all").exists():
        time.sleep(1.5)  # stands: retry


def download() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as there:
        there.recv(1 << 20)  # stands: download


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # stands: stopped


def python(until: float = float("inf")) -> None:
    while time.monotonic() < until:
        sum(n * n for n in range(10_000))  # stands: python


def waits() -> None:
    threading.Event().wait()  # stands: exit_lock


class Samples:
    """A data set whose worker hangs, or takes its time."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, n: int) -> float:
        python(time.monotonic() + SECONDS) if SECONDS else waits()
        return 1.0


def loader() -> None:
    from torch.utils.data import DataLoader

    next(iter(DataLoader(Samples(), batch_size=1, num_workers=1)))  # stands: loader


# What is healthy


def works() -> None:
    python(time.monotonic() + SECONDS)


def native() -> None:
    until, matrix = time.monotonic() + SECONDS, torch.ones(2000, 2000)
    while time.monotonic() < until:
        matrix @ matrix


def holds_the_gil() -> None:
    until, length = time.monotonic() + SECONDS, 24
    while time.monotonic() < until:
        began = time.monotonic()
        re.match(r"(a+)+$", "a" * length + "b")
        length += time.monotonic() - began < SECONDS / 4


def child() -> None:
    busy = f"import time; end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)


def pool() -> None:
    """Two threads write a file, while the main thread waits for them."""

    def write(name: str) -> None:
        with open(f"{tempfile.gettempdir()}/{os.getpid()}-{name}", "wb") as file:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                file.seek(0)
                file.write(bytes(1 << 20))
                file.flush()
                time.sleep(0.5)

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, ["a", "b"]))


def beside(text: str) -> subprocess.Popen[bytes]:
    """A process that is none of the program's: it has left its family."""
    leaves = f"import os\nif os.fork(): os._exit(0)\n{text}" if "kill" not in text else text
    command = [sys.executable, "-S", "-c", leaves]
    return subprocess.Popen(command, start_new_session=True, close_fds=False)


def slow_download() -> None:
    """A kilobyte five times a second, taken in by one call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        beside(f"""
import socket, time
there = socket.create_connection(("127.0.0.1", {port}))
for _ in range(int(5 * {SECONDS})):
    there.send(bytes(1000))
    time.sleep(0.2)
""")
        there, _ = server.accept()
        with there, there.makefile("rb", 1 << 24) as file:
            file.read(1 << 24)


def starved() -> None:
    """As where memory is swapped: it gets a processor for an instant, every other second."""
    helper = beside(f"""
import os, signal, time
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    os.kill({os.getpid()}, signal.SIGSTOP)
    time.sleep(1.9)
    os.kill({os.getpid()}, signal.SIGCONT)
    time.sleep(0.1)
""")
    while helper.poll() is None:
        sum(n * n for n in range(1000))


def slow_storage() -> None:
    """A file that comes byte by byte."""
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    beside(f"""
import os, time
for _ in range(int({SECONDS})):
    os.write({writes}, b"x")
    time.sleep(1)
""")
    os.close(writes)
    with open(reads, "rb") as file:
        file.read()


# What all ranks do together


def different() -> None:
    if RANK == WORLD - 1:
        dist.all_reduce(x)  # stands: different, all_reduce
    else:
        dist.broadcast(x, 0)  # stands: different, broadcast


def order() -> None:
    one, two = groups if RANK else groups[::-1]
    dist.all_reduce(x, group=one)  # stands: order, all_reduce
    dist.all_reduce(x, group=two)


def left() -> None:
    if RANK == BAD:
        os._exit(0)
    dist.barrier()  # stands: left, barrier


def skips() -> None:
    if RANK != BAD:
        dist.barrier()  # stands: skips, barrier
    dist.all_reduce(x)  # stands: skips, all_reduce


def groups_differ() -> None:
    if RANK == 0:
        dist.all_reduce(x, group=pair)  # stands: groups_differ, all_reduce
    else:
        dist.all_reduce(x)  # stands: groups_differ, all_reduce


def both_receive() -> None:
    dist.recv(x, (RANK + 1) % WORLD)  # stands: both_receive, recv


def barrier_and_reduce() -> None:
    if RANK == BAD:
        dist.barrier()  # stands: barrier_and_reduce, barrier
    else:
        dist.all_reduce(x)  # stands: barrier_and_reduce, all_reduce


def raises() -> None:
    try:
        if RANK == BAD:
            raise RuntimeError("no more data")
        dist.all_reduce(x)  # stands: raises, all_reduce
    finally:
        dist.barrier()  # stands: raises, barrier


def exit_barrier() -> None:
    def last() -> None:
        if RANK == BAD:
            dist.barrier()  # stands: exit_barrier, barrier
        else:
            dist.all_reduce(x)  # stands: exit_barrier, all_reduce

    atexit.register(last)


TOGETHER = (
    *(exit_barrier, different, order, left, skips, groups_differ, both_receive, raises),
    barrier_and_reduce,
)


def exit_lock() -> None:
    threading.Thread(target=waits).start()


def here(phase: str) -> None:
    if phase != PHASE:
        return
    kind = globals()[KIND]
    if RANK == BAD or kind in TOGETHER:
        Path(f"arrived-{RANK}").touch()
        kind()
    together = phase == "prepare" or (FORM != "survive" and phase in ("between", "step", "after"))
    if together and kind not in TOGETHER:
        dist.barrier()  # stands: all, barrier


here("import")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
here("start")
dist.init_process_group("gloo", timeout=timedelta(hours=9))  # else torch ends it after 30 minutes
x = torch.ones(1)
groups = [dist.new_group(list(range(WORLD))) for _ in range(2)]
pair = dist.new_group(sorted({0, WORLD - 1}))
model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
here("prepare")


def train(step: int) -> None:
    optimizer.zero_grad()
    if step == 4:
        here("step")
    model(torch.ones(2, 1)).sum().backward()  # stands: train, backward
    optimizer.step()
    if step == 4:
        here("between")


if FORM == "survive":
    from kempner import survive

    steps = survive(model, optimizer, steps=6, save_every=5, seed=2)
    for step in steps:
        if step == 4 and PHASE == "evaluation" and RANK == BAD:
            with steps.evaluation():
                here("evaluation")
        train(step)
elif FORM == "by_hand":
    from kempner import CheckpointManager, ShutdownHandler

    checkpoints = CheckpointManager(os.environ["FOLDER"], model, optimizer)
    start = checkpoints.restore() or 0
    with ShutdownHandler() as shutdown:
        for step in range(start + 1, 7):
            train(step)
            if step % 5 == 0 or shutdown.should_shutdown():
                checkpoints.save(step)
else:
    for step in range(1, 7):
        train(step)
here("after")
here("exit")
