"""Makes the pictures of docs/images, of a run that really met with all that they show.

    python scripts/docs/report_picture.py [RUN_DIR]

Without RUN_DIR it makes the run, in two minutes, from the data of `make demo`: two ranks, of which
one is killed, one hangs, and which are stopped and started again. `kempner status` is drawn while
it trains, the report when it is over, which needs chromium.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from browser import Browser, chromium  # noqa: E402
from rich.console import Console  # noqa: E402

from kempner.cli.insight.status_view import panel  # noqa: E402
from kempner.insight.status.job import JobWatch  # noqa: E402
from kempner.insight.status.runs import RunFollower  # noqa: E402
from kempner.run.record.ledger import read_lines  # noqa: E402
from kempner.run.record.run_dir import RunDirectory  # noqa: E402

IMAGES = ROOT / "docs" / "images"
KEMPNER = (sys.executable, "-m", "kempner")

NAME = "llama-tiny"
OVERRIDES = (
    f"--run.name={NAME}",
    "--train.max_steps=320",
    "--checkpoint.interval=25",
    "--eval.interval=100",
    "--resilience.hang_timeout_min=8",
    "--resilience.hang_timeout_max=8",
)
FAULTS = "kill rank 1 at step 90; hang rank 1 at step 160 attempt 2"
STOP_AFTER, AWAY = 180, 10.0
"""The step after which the run is stopped, and for how many seconds it is not run then."""

WIDTH = 1000
PICTURES = {"report.png": "section:nth-of-type(2)", "report_top.png": ".strip"}
"""Each file shows the page down to the end of this element."""

COLUMNS = 100
"""Width of the terminal in which the status is drawn."""

_ELEMENT_ENDS = "document.querySelector({!r}).getBoundingClientRect().bottom + scrollY"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="a run to show instead of a new one")
    run = parser.parse_args().run or make_run()
    with tempfile.TemporaryDirectory() as name:
        html = Path(name) / "report.html"
        subprocess.run([*KEMPNER, "report", str(run), "--output", str(html)], check=True)
        with chromium(Path(name) / "profile") as browser:
            browser.open(html, WIDTH, dark=False)
            for file, element in PICTURES.items():
                ends = float(browser.value(_ELEMENT_ENDS.format(element)))
                (IMAGES / file).write_bytes(picture(browser, height=ends + 24))
    return 0


def picture(browser: Browser, height: float) -> bytes:
    """The upper part of the page, as PNG."""
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = browser.call(
        "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
    )
    return base64.b64decode(shot["data"])


def make_run() -> Path:
    """A run with a failure, a hang and a stop; its directory."""
    run = RunDirectory(ROOT / "runs" / NAME)
    shutil.rmtree(run.path, ignore_errors=True)
    command = [*KEMPNER, "supervise", "--nproc=2", "configs/train/debug.toml", *OVERRIDES]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env={**environ, "KEMPNER_FAULTS": FAULTS}) as process:
        while _last_step(run) < STOP_AFTER and process.poll() is None:
            time.sleep(0.5)
        draw_status(run)
        process.send_signal(signal.SIGTERM)
    time.sleep(AWAY)
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    return run.path


def draw_status(run: RunDirectory) -> None:
    """What `kempner status` shows of a run at this moment."""
    status = RunFollower(run, JobWatch(None, wait=True), patient=True).read()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    name = str(run.path.relative_to(ROOT))
    console.print(panel(name, status, COLUMNS, "", 2))
    (IMAGES / "status.svg").write_text(console.export_svg(title=f"kempner status {name}"))


def _last_step(run: RunDirectory) -> int:
    if not run.metrics.is_file():
        return 0
    return max((entry["step"] for entry in read_lines(run.metrics)), default=0)


if __name__ == "__main__":
    sys.exit(main())
