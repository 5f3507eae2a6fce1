"""What the demo's run came to: its held-out loss beside the trigram's.

    python scripts/demo/report.py CONFIG

Exits with 1 if the network does not beat the trigram.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from yardstick import held_out_loss

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.config.loading import load
from kempner.data.files.token_file import Corpus
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="the configuration that was trained")
    config = load(parser.parse_args().config)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    train, held_out = (
        Corpus.open(config.data.dataset_path),
        Corpus.open(config.eval.dataset_path or ""),
    )
    evaluated = [line for line in read_lines(run.metrics) if "eval_loss" in line][-1]
    network, trigram = evaluated["eval_loss"], held_out_loss(train, held_out, config)

    steps = ", ".join(str(step) for step in CheckpointFolder(run.checkpoints).committed())
    print(f"checkpoints in {run.checkpoints}: steps {steps}")
    print(f"network held-out loss: {network:.4f} nats per byte, after step {evaluated['step']}")
    print(f"trigram held-out loss: {trigram:.4f} nats per byte, fitted on the same training bytes")
    if network >= trigram:
        print("the network did not beat the trigram", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
