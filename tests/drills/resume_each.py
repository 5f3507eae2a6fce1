"""Resume in each of several runs, as `kempner train` does. Usage: CONFIG OVERRIDE... -- RUN..."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from kempner.config.loading import load
from kempner.run.attempts import begin_attempt
from kempner.run.layout import RunDirectory
from kempner.training.assembly import build
from kempner.training.distributed import connect
from kempner.training.faults import arm
from kempner.training.presence import appear
from kempner.training.shutdown import ShutdownHandler

config_file, *arguments = sys.argv[1:]
split = arguments.index("--")
config, shutdown = load(Path(config_file), arguments[:split]), ShutdownHandler()
alone = appear(config, shutdown)
ranks = connect(alone.world, config)
for path in arguments[split + 1 :]:
    run = RunDirectory(Path(path))
    training = build(
        config, replace(alone, run=run), ranks, begin_attempt(run), shutdown, arm(config, alone)
    )
    print("loaded", training.position.step, flush=True)
    training.checkpoints.close()
    training.feed.close()
    training.telemetry.close()
