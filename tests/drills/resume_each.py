"""Resume in each of several runs, as `kempner train` does. Usage: CONFIG OVERRIDE... -- RUN..."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from kempner.config.loading import load
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import build
from kempner.training.fault_injection import arm
from kempner.training.groups.process_groups import connect
from kempner.training.rank_link.rank_link import open_rank_link
from kempner.training.rank_link.shutdown import StopListener

config_file, *arguments = sys.argv[1:]
split = arguments.index("--")
config, shutdown = load(Path(config_file), arguments[:split]), StopListener()
alone = open_rank_link(config, shutdown)
ranks = connect(alone.world, config)
for path in arguments[split + 1 :]:
    run = RunDirectory(Path(path))
    training = build(
        config, replace(alone, run=run), ranks, begin_attempt(run), shutdown, arm(config, alone)
    )
    print("loaded", training.train_state.step, flush=True)
    training.checkpoints.close()
    training.tools.data.feed.close()
    training.tools.step_metrics.close()
