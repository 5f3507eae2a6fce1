#!/bin/bash
# Train in an allocation that you have already, next to whatever else runs in it.
#
#   salloc --nodes=2 --gpus-per-node=4 ...
#   scripts/slurm/interactive.sh JOBID configs/train/7b.toml [--section.key=value]...
#
# Ctrl-C stops after the step under way, with a checkpoint; the allocation stays yours.
set -euo pipefail
job=${1:?usage: interactive.sh JOBID CONFIG [--section.key=value]...}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/slurm/environment.sh
require_config "$@"
exec "$KEMPNER_PYTHON" -P -m kempner supervise "$@" --launcher srun --jobid "$job"
