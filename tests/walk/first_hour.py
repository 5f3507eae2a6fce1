"""The first hour of a new user, walked through for real: `make walk`.

Builds the wheel, installs it into a fresh environment where this checkout is not seen, and goes
from `kempner init` over the user's own texts, a Ctrl-C and a closed terminal to a model that
transformers opens; then, where a Slurm cluster can be started (as root, tests/slurm/lab.py), to a
job that is preempted and completes. Each part is timed; what takes more than a minute, or needs a
second try, is explained by `EXPLAINED`, or marked as what nobody can explain. Exits with 1 if a
part fails.

    python tests/walk/first_hour.py --record docs/first_hour.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "slurm")]

import records  # noqa: E402
from harness import wait_until  # noqa: E402
from patience import scaled  # noqa: E402
from terminal import CTRL_C, Terminal  # noqa: E402

LONG = 60.0
"""Seconds above which a part needs an explanation."""

STEPS = 2000
"""Of training: enough for a Ctrl-C to come before the last one."""

EXPLAINED = {
    "install": "PyTorch and what it needs are downloaded and unpacked: about 1 GB on disk",
    "install transformers": "one more download",
    "train to the end": f"{STEPS:,} steps of training itself, on the CPU",
    "build the wheel": "pip downloads hatchling into an environment of its own",
    "cluster: sbatch": "eight ranks, one per GPU of two nodes, share the cores of this machine",
    "cluster: completed": "Slurm waits before it starts a requeued job again, by default 120 s",
}
"""Why a part may take longer than `LONG`, or a second try."""

TEXTS = """
import pydoc_data.topics, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
topics = list(pydoc_data.topics.topics.values())
for folder, texts in (("texts", topics[:-8]), ("held-out", topics[-8:])):
    Path(folder).mkdir()
    for number, text in enumerate(texts):
        Path(folder, f"{number}.txt").write_text(text)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = ["<|endoftext|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
tokenizer.train_from_iterator(topics, trainer)
tokenizer.save("tokenizer.json")
"""
"""The user's own: Python's help topics, and a tokenizer as Hugging Face writes them."""

OPEN = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("exported")
model = AutoModelForCausalLM.from_pretrained("exported")
tokens = tokenizer("The value of", return_tensors="pt")
made = model.generate(**tokens, max_new_tokens=20, do_sample=False)
assert made.shape[1] > tokens["input_ids"].shape[1]
print(tokenizer.decode(made[0]))
"""


@dataclass
class Part:
    """One thing that a new user does: how long it took, in seconds, and how it went."""

    name: str
    seconds: float = 0.0
    tries: int = 0
    outcome: str = ""
    explanation: str = ""


@dataclass
class Walk:
    """A new user in an empty folder, with an environment of their own."""

    folder: Path
    parts: list[Part] = field(default_factory=list)

    @property
    def bin(self) -> Path:
        """Of the fresh environment."""
        return self.folder / "env" / "bin"

    @property
    def project(self) -> Path:
        """What `kempner init` writes."""
        return self.folder / "my-project"

    @property
    def environ(self) -> dict[str, str]:
        """Without anything of this checkout."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{self.bin}:{kept.get('PATH', '')}"
        return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def part(self, name: str, do: Callable[[], object], tries: int = 1) -> None:
        """Do something, time it, and go on also if it fails."""
        part = Part(name)
        began = time.monotonic()
        while part.outcome != "ok" and part.tries < tries:
            part.tries += 1
            try:
                do()
                part.outcome = "ok"
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                part.outcome = f"failed: {error}".strip()
        part.seconds = round(time.monotonic() - began, 1)
        if part.seconds > LONG or part.tries > 1:
            part.explanation = EXPLAINED.get(name, "UNEXPLAINED")
        self.parts.append(part)
        print(f"{part.seconds:7.1f} s  {part.name}: {part.outcome}", flush=True)

    def run(self, *command: object, cwd: Path | None = None, code: int = 0) -> str:
        """What a command prints; it must end with `code`."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.project,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=scaled(1800),
        )
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout[-2000:]}"
        return done.stdout

    def kempner(self, *arguments: object) -> str:
        """What kempner prints, in the project."""
        return self.run(self.bin / "kempner", *arguments)

    def events(self, name: str) -> list[dict[str, object]]:
        """The ledger's lines of one event."""
        ledger = self.project / "runs" / "train" / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == name]


def install(walk: Walk) -> None:
    """From the repository to a `kempner` on the PATH."""
    dist = walk.folder / "dist"
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", dist, ROOT)
    walk.part("build the wheel", lambda: walk.run(*wheel, cwd=walk.folder), tries=2)
    new = (sys.executable, "-m", "venv", walk.folder / "env")
    walk.part("make an environment", lambda: walk.run(*new, cwd=walk.folder))
    pip = (walk.bin / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    get = lambda: walk.run(*pip, *dist.glob("*.whl"), cwd=walk.folder)  # noqa: E731
    walk.part("install", get, tries=2)


def set_up(walk: Walk) -> None:
    """A project with the user's own texts and tokenizer."""
    walk.part("init", lambda: walk.run(walk.bin / "kempner", "init", "my-project", cwd=walk.folder))
    walk.part("texts and a tokenizer", lambda: walk.run(walk.bin / "python", "-c", TEXTS))
    walk.part("prepare", lambda: prepare(walk))
    walk.part("check", lambda: walk.kempner("config", "check", "train.toml"))


def prepare(walk: Walk) -> None:
    """Training and held-out data; the user edits the number of steps."""
    for out, texts in (("train", "texts"), ("held_out", "held-out")):
        words = ("--out", f"data/{out}", texts, "--tokenizer", "tokenizer.json")
        contains(walk.kempner("prepare", *words), "tokenizer of 1,000 tokens")
    config = walk.project / "train.toml"
    config.write_text(config.read_text().replace("max_steps = 1000", f"max_steps = {STEPS}"))


def train(walk: Walk) -> None:
    """Train, press Ctrl-C, go on, close the terminal, go on to the end."""
    walk.part("train, and press Ctrl-C", lambda: supervise_until(walk, 5, press_ctrl_c))
    walk.part("resume, and close the terminal", lambda: supervise_until(walk, 5, close_window))
    walk.part("status", lambda: contains(walk.kempner("status", "runs/train"), "stopped"))
    to_end = lambda: walk.kempner("supervise", "train.toml")  # noqa: E731
    walk.part("train to the end", lambda: contains(to_end(), f"completed {STEPS} steps"))


def supervise_until(walk: Walk, more: int, end: Callable[[Walk, Terminal], None]) -> None:
    """Train in a terminal for some more steps, and then end it in some way: no step is lost."""
    stops = len(walk.events("stopped"))
    done = max((int(str(e["step"])) for e in walk.events("stopped")), default=0)
    terminal = Terminal.open("kempner supervise train.toml", walk.project, walk.environ)
    metrics = walk.project / "runs" / "train" / "metrics.jsonl"

    def come_far() -> bool:
        assert terminal.shell.poll() is None, "\n".join(terminal.lines())
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return any(f'"step": {done + more},' in line for line in lines)

    try:
        wait_until(come_far, f"step {done + more}", 300)
        assert not done or any("resumed at step" in line for line in terminal.lines())
        end(walk, terminal)
        wait_until(lambda: terminal.shell.poll() is not None, "the end of the command", 120)
        stopped = walk.events("stopped")
        assert len(stopped) == stops + 1, "no stop in the ledger"
        assert stopped[-1]["lost_steps"] == 0, stopped[-1]
    finally:
        terminal.end()


def press_ctrl_c(walk: Walk, terminal: Terminal) -> None:
    """Ctrl-C, and a look at what it says."""
    terminal.type(CTRL_C)
    told = lambda: any("stopped after step" in line for line in terminal.lines())  # noqa: E731
    wait_until(told, "what is said after a Ctrl-C", 120)


def close_window(walk: Walk, terminal: Terminal) -> None:
    """The kernel hangs up."""
    terminal.close()


def use(walk: Walk) -> None:
    """The trained model, elsewhere and here."""
    export = ("checkpoint", "export", "runs/train", "--out", "exported")
    walk.part("export", lambda: walk.kempner(*export))
    pip = (walk.bin / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "transformers")
    walk.part("install transformers", lambda: walk.run(*pip), tries=2)
    walk.part("open in transformers", lambda: walk.run(walk.bin / "python", "-c", OPEN))
    prompt = ("sample", "runs/train", "--prompt", "The value of")
    walk.part("sample", lambda: contains(walk.kempner(*prompt), "The value of"))


def on_a_cluster(walk: Walk) -> None:
    """The same project on a real Slurm: submit, preempt, look, complete."""
    from lab import LOGIN, Cluster

    cluster = Cluster(Path(tempfile.mkdtemp(prefix="lab-", dir=walk.folder)))
    try:
        walk.part("cluster: start it (not the user's part)", cluster.up)
        Jobs(walk, cluster, LOGIN).walk_through()
    finally:
        cluster.down()


class Jobs:
    """What the user does on the login machine."""

    def __init__(self, walk: Walk, cluster: object, login: str) -> None:
        self.walk, self.cluster, self.login = walk, cluster, login
        self.project, self.job = walk.folder / "on-slurm", ""

    def walk_through(self) -> None:
        """From `init` to a job that was preempted and is complete."""
        part = self.walk.part
        part("cluster: init", self.init)
        part("cluster: sbatch", self.submit)
        part("cluster: preempt", self.preempt)
        part("cluster: status", self.look)
        part("cluster: completed", self.complete)

    def on_login(self, *command: str, cwd: Path) -> str:
        environ: Mapping[str, str] = {"PATH": f"{self.walk.bin}:{self.cluster.environ['PATH']}"}
        return str(self.cluster.run(self.login, *command, cwd=cwd, **environ).stdout)

    def init(self) -> None:
        told = self.on_login("kempner", "init", str(self.project), cwd=self.walk.folder)
        contains(told, "8 nodes of 4 GPUs and 8 CPUs")
        shutil.copytree(self.walk.project / "data", self.project / "data")

    def submit(self) -> None:
        words = "sbatch --parsable --nodes=2 scripts/slurm/multinode.sh train.toml"
        few = ["--train.max_steps=40", "--train.threads=1"]
        self.job = self.on_login(*words.split(), *few, cwd=self.project).split()[-1]
        wait_until(lambda: self.steps() >= 5, "step 5 of the job", 300)

    def steps(self) -> int:
        metrics = self.project / "runs" / "train" / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def preempt(self) -> None:
        self.cluster.preempt(self.job)
        requeued = lambda: self.cluster.job(self.job)["Restarts"] == "1"  # noqa: E731
        wait_until(requeued, "the job is back in the queue", 180)

    def look(self) -> None:
        contains(self.on_login("kempner", "status", self.job, cwd=self.project), "restarts")

    def complete(self) -> None:
        ended = self.cluster.wait_for(self.job, "COMPLETED", "FAILED", "CANCELLED", deadline=400)
        log = "".join(path.read_text() for path in (self.project / "logs").glob("*.out"))
        assert ended == "COMPLETED", log[-2000:]
        contains(log, "completed 40 steps")


def contains(text: str, words: str) -> None:
    """Fail with the text if the words are not in it."""
    assert words in text, f"no {words!r} in: {text[-2000:]}"


def show(parts: list[Part]) -> None:
    """A table of the parts."""
    print(f"\n{'part':40} {'seconds':>8} {'tries':>5}  how it went")
    for part in parts:
        how = part.outcome.partition("\n")[0][:60] if part.outcome != "ok" else part.explanation
        print(f"{part.name:40} {part.seconds:8.1f} {part.tries:5}  {how or 'ok'}")
    print(f"{'all':40} {sum(part.seconds for part in parts):8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, help="where to keep how it went")
    parser.add_argument("--no-cluster", action="store_true", help="leave the Slurm cluster out")
    parser.add_argument("--env", type=Path, help="an environment that has kempner: install nothing")
    given = parser.parse_args()
    walk = Walk(Path(tempfile.mkdtemp(prefix="first-hour-")))
    try:
        if given.env is None:
            install(walk)
        else:
            (walk.folder / "env").symlink_to(given.env.resolve())
        set_up(walk)
        train(walk)
        use(walk)
        from lab import missing

        if not given.no_cluster and not missing():
            on_a_cluster(walk)
    finally:
        shutil.rmtree(walk.folder, ignore_errors=True)
    show(walk.parts)
    if given.record:
        told = records.header(["kempner"])
        rows = [asdict(part) | told for part in walk.parts]
        records.write(given.record, rows, by=())  # the whole record
    return 0 if all(part.outcome == "ok" for part in walk.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
