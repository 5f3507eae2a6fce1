#!/bin/bash
# Train with one torchrun per node, for what insists on torchrun. Prefer multinode.sh: there a
# preemption reaches the ranks themselves.
#
#   sbatch --nodes=2 scripts/slurm/torchrun.sh configs/train/7b.toml [--section.key=value]...
#
# Edit the lines below for your cluster, or override them: sbatch -p PARTITION -A ACCOUNT ...
#SBATCH --job-name=kempner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%j_%x.out
set -euo pipefail
trap '' TERM  # a warning must not end the job before the supervisor is there
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
source scripts/slurm/environment.sh
require_config "$@"
exec "$KEMPNER_PYTHON" -P -m kempner supervise "$@" --launcher torchrun
