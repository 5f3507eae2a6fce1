#!/bin/bash
# Train on one node of a Slurm cluster, one rank per GPU, and come back after every interruption.
#
#   sbatch scripts/slurm/singlenode.sh configs/train/7b.toml [--section.key=value]...
#
# The ranks are tasks of a step, not torchrun's children: torchrun kills its children 30 seconds
# after a signal, however long a checkpoint takes, and a preemption warns nothing outside of a step.
# Edit the lines below for your cluster, or override them: sbatch -p PARTITION -A ACCOUNT ...
#SBATCH --job-name=kempner
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
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
exec "$KEMPNER_PYTHON" -P -m kempner supervise "$@" --launcher srun
