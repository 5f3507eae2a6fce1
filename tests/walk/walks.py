"""Five readers, each of whom types what stands on a page, from the installation to a resumed run.

    python tests/walk/walks.py [WALK ...] [--record docs/walks.jsonl] [--env DIR]

A student, a researcher with a loop of their own, one with transformers' Trainer, one with
Lightning, and an administrator with a batch script. Each has an empty folder, a fresh environment
and a wheel, and never sees this checkout: what is typed is what the page has in its console blocks,
in their order, and the examples are saved when the page has linked them (`blocks.to_do`). What
comes below a `<!-- walk: on a cluster -->` is typed on the login machine of a real Slurm cluster
(as root, tests/slurm/lab.py; left out where there is none), and the job is preempted.

Of each thing that is typed: seconds, tries, how it went, and the longest time in which the screen
did not change. A run that was stopped must go on with the next step, by its ledger. Exits with 1 if
anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in (".", "slurm", "pages")]

import records  # noqa: E402
from blocks import Command, Reader, to_do  # noqa: E402
from patience import wait_until  # noqa: E402
from terminal import Terminal  # noqa: E402

if TYPE_CHECKING:
    from lab import Cluster

DOCS = ROOT / "docs"
INSTALL = "pip install "
TRAINED = 5
"""Steps of a job after which it is preempted."""


# What a reader brings


def bring_texts(folder: Path) -> None:
    """Python's help topics, as texts of one's own."""
    from pydoc_data.topics import topics

    (folder / "my-texts").mkdir()
    for number, text in enumerate(topics.values()):
        (folder / "my-texts" / f"{number}.txt").write_text(text)


def bring_job(folder: Path) -> None:
    """A batch script, made to fit the cluster, and a program that goes on where it was."""
    script = ROOT / "tests" / "unit" / "project" / "batch_scripts" / "torchrun_one_node.sbatch"
    changes = {"--cpus-per-task=32": "--cpus-per-task=4", "-t 1-00:00:00": "-t 60"}
    (folder / "job.sbatch").write_text(_changed(script, changes))
    program = _changed(DOCS / "examples" / "surviving.py", {"STEPS = 200": "STEPS = 20000"})
    (folder / "train.py").write_text(program)


def _changed(file: Path, changes: Mapping[str, str]) -> str:
    text = file.read_text()
    for before, after in changes.items():
        assert before in text, f"no {before!r} in {file.name}"
        text = text.replace(before, after)
    return text


# The walks


@dataclass(frozen=True)
class Walk:
    """The pages that are typed, and what their reader has before."""

    pages: tuple[str, ...]
    bring: Callable[[Path], None] | None = None

    def to_do(self) -> list[Path | Command]:
        return [do for page in self.pages for do in to_do((DOCS / page).read_text())]


WALKS = {
    "student": Walk(("quickstart.md",), bring_texts),
    "own loop": Walk(("own_loop.md",)),
    "Trainer": Walk(("trainer.md",)),
    "Lightning": Walk(("lightning.md",)),
    "administrator": Walk(("admins.md", "wrap.md"), bring_job),
}


@dataclass
class Part:
    """One thing that a reader does: how long it took and was silent, in seconds, and how it went.

    `after` is the line before the silence.
    """

    walk: str
    what: str
    seconds: float = 0.0
    tries: int = 0
    outcome: str = ""
    silence: float = 0.0
    after: str = ""


class LoginReader(Reader):
    """Types on the login machine of a cluster."""

    def __init__(self, folder: Path, environ: Mapping[str, str], cluster: Cluster) -> None:
        super().__init__(folder, {**cluster.environ, **environ}, waiting=60.0)
        self._cluster = cluster

    def open(self, command: Command) -> Terminal:
        from lab import LOGIN

        shell = ["bash", "-c", command.text]
        inside = self._cluster.machines[LOGIN].inside(shell, self.folder)
        return Terminal.open(shlex.join(inside), self.folder, self.environ)


@dataclass
class Walker:
    """Who walks: a folder with an environment in it, and what was done."""

    name: str
    folder: Path
    dist: Path
    env: Path | None
    parts: list[Part] = field(default_factory=list)
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        self.reader = self.login = Reader(self.folder, self.environ)

    @property
    def stuck(self) -> bool:
        """Whether something could not be done: what follows would fail as well."""
        return any(part.outcome != "ok" for part in self.parts)

    @property
    def environ(self) -> dict[str, str]:
        """One's own, with the wheel in the place of an index that has kempner."""
        links = f"{self.dist} {_pip('config', 'get', 'global.find-links')}"
        return {
            "PATH": f"{self.folder}/env/bin:{sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.folder),
            "PIP_CACHE_DIR": _pip("cache", "dir"),
            "PIP_FIND_LINKS": links.strip(),
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "HF_HUB_OFFLINE": "1",
        }

    def walk(self, walk: Walk, with_cluster: bool) -> None:
        """From an empty folder to runs that were resumed."""
        if walk.bring is not None:
            walk.bring(self.folder)
        if self.env is None:
            self.type(Command("python3 -m venv env", ()))
        else:
            (self.folder / "env").symlink_to(self.env.resolve())
        try:
            for do in walk.to_do():
                if self.stuck:
                    break
                if isinstance(do, Path):
                    self.part(f"save {do.name}", lambda do=do: self.save(do))
                elif not do.on_cluster or with_cluster:
                    self.type(do)
            if not self.stuck:
                self.part("the runs went on with the next step", self.check)
        finally:
            if self.cluster is not None:
                self.cluster.down()

    def save(self, example: Path) -> None:
        shutil.copy(DOCS / example, self.reader.folder)

    def type(self, command: Command) -> None:
        """Type a command; one that submits a job also sees what becomes of the job."""
        installs = command.text.startswith(INSTALL)
        if installs and self.env is not None:
            return
        if command.on_cluster and self.cluster is None:
            self.part("start a cluster (not the reader's part)", self.start_cluster)
        reader = self.login if command.on_cluster else self.reader
        tries = 2 if installs else 1
        self.part(command.text, lambda: reader.type(command), tries)
        if command.text.startswith("sbatch ") and not self.stuck:
            self.part("the job trains", self.await_training)
            self.part("it is preempted, and comes back", self.preempt)

    def part(self, what: str, do: Callable[[], object], tries: int = 1) -> None:
        """Do something, and time it."""
        part = Part(self.name, what)
        began = time.monotonic()
        while part.outcome != "ok" and part.tries < tries:
            part.tries += 1
            try:
                found = do()
                part.outcome = "ok"
                if isinstance(found, Terminal):
                    part.silence, part.after = round(found.silence, 1), found.after
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                part.outcome = f"failed: {error}".strip()
        part.seconds = round(time.monotonic() - began, 1)
        self.parts.append(part)
        said = f"{part.seconds:7.1f} s, silent {part.silence:4.1f}  {self.name}: {what}"
        print(f"{said}: {part.outcome}", flush=True)

    # On a cluster

    def start_cluster(self) -> None:
        from lab import Cluster

        self.cluster = Cluster(Path(tempfile.mkdtemp(prefix="lab-", dir=self.folder)))
        self.cluster.up()
        self.login = LoginReader(self.folder, self.environ, self.cluster)

    @property
    def job(self) -> str:
        """The newest job of the reader's."""
        assert self.cluster is not None
        from lab import LOGIN

        told = self.cluster.run(LOGIN, "squeue", "-h", "-o", "%i %j").stdout.splitlines()
        jobs = [line.split()[0] for line in told if not line.endswith("preemptor")]
        assert jobs, "there is no job"
        return jobs[0]

    def await_training(self) -> None:
        try:
            wait_until(lambda: self.steps() >= TRAINED, f"step {TRAINED} of the job", 300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-2000:]}") from None

    def preempt(self) -> None:
        """Another job takes its nodes; Slurm puts it back into the queue, and starts it again."""
        assert self.cluster is not None
        self.cluster.preempt(self.job)

        def resumed() -> bool:
            (events,) = self.ledgers(self.login.folder).values()
            return any(event["event"] == "ready_to_train" and event["step"] for event in events)

        wait_until(resumed, "the job's return", 300)

    def steps(self) -> int:
        return max(map(int, re.findall(r"step (\d+)\b.*loss", self.log())), default=0)

    def log(self) -> str:
        logs = [*self.login.folder.glob("*.out"), *self.login.folder.glob("logs/*.out")]
        return "".join(path.read_text(errors="replace") for path in logs)

    # What has become of the runs

    def ledgers(self, below: Path) -> dict[str, list[dict[str, Any]]]:
        """What the runs below a folder have told, by their place in it."""
        found = {}
        for ledger in below.glob("**/runs/*/ledger.jsonl"):
            lines = ledger.read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            found[str(ledger.parent.relative_to(below))] = whole
        return found

    def check(self) -> None:
        ledgers = self.ledgers(self.folder)
        assert ledgers, "there is no run"
        for run, events in ledgers.items():
            assert (fault := fault_of(events)) is None, f"{run}: {fault}"


def fault_of(events: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with a run that was to be stopped, and to go on with the next step."""
    stops = [n for n, event in enumerate(events) if event["event"] == "stopped"]
    if not stops:
        return "was never stopped"
    for place in stops:
        stop = events[place]
        if stop["lost_steps"]:
            return f"lost {stop['lost_steps']} steps at its stop after step {stop['step']}"
        later = (e["step"] for e in events[place:] if e["event"] == "ready_to_train")
        if (step := next(later, None)) != stop["step"]:
            return f"was stopped after step {stop['step']}, and went on after {step}"
    return None


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().replace("\n", " ")


def build(dist: Path) -> None:
    """The wheel that all of them install."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(dist)]
    subprocess.run([*command, str(ROOT)], check=True)


def show(parts: Sequence[Part]) -> None:
    """The walks, and what was silent for longest, of kempner and of others."""
    for walk in dict.fromkeys(part.walk for part in parts):
        ours = [part for part in parts if part.walk == walk]
        seconds, failed = sum(part.seconds for part in ours), [p for p in ours if p.outcome != "ok"]
        again = sum(part.tries - 1 for part in ours)
        print(f"{walk}: {seconds:.0f} s, {len(failed)} parts failed, {again} tried again")
    for whose, wanted in (("kempner", True), ("others", False)):
        among = [part for part in parts if part.what.startswith("kempner ") is wanted]
        slowest = max(among, key=lambda part: part.silence, default=None)
        if slowest is not None:
            told = f"{slowest.silence} s, {slowest.walk}: {slowest.what}, after {slowest.after!r}"
            print(f"longest silence of {whose}: {told}")


def rows_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """For the record: a part is about all of kempner, and about the pages that were typed."""
    pages = {name: [f"docs/{page}" for page in walk.pages] for name, walk in WALKS.items()}
    return [asdict(part) | records.header(["kempner", *pages[part.walk]]) for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"of {', '.join(WALKS)}")
    parser.add_argument("--record", type=Path, help="where to keep how they went")
    parser.add_argument("--env", type=Path, help="an environment that has kempner: install nothing")
    given = parser.parse_args()
    if unknown := {*given.walks} - {*WALKS}:
        parser.error(f"no walk: {', '.join(sorted(unknown))}")
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        del os.environ[name]
    from lab import missing

    if reason := missing():
        print(f"nothing is typed on a cluster: {reason}")
    records.commit()  # that which is built now
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="walks-", ignore_cleanup_errors=True) as place:
        dist = Path(place) / "dist"
        if given.env is None:
            build(dist)
        for number, name in enumerate(given.walks or WALKS):
            folder = Path(place) / f"walk-{number}"
            folder.mkdir()
            walker = Walker(name, folder, dist, given.env)
            walker.walk(WALKS[name], with_cluster=not reason)
            parts += walker.parts
            shutil.rmtree(folder, ignore_errors=True)
    show(parts)
    if given.record:
        records.write(given.record, rows_of(parts), by=("walk",), only={"walk": WALKS})
    return 0 if all(part.outcome == "ok" for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
