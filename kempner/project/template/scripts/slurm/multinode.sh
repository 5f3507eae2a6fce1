#!/bin/bash
# Train on whole nodes of a Slurm cluster, one rank per GPU, and come back after every interruption.
#
#   sbatch --nodes=8 scripts/slurm/multinode.sh configs/train/7b.toml [--section.key=value]...
#
# Edit the lines below for your cluster, or override them: sbatch -p PARTITION -A ACCOUNT ...
# Submit from the project's folder: logs/ must exist before the job starts.
# See docs/slurm.md.
#SBATCH --job-name=kempner
#SBATCH --nodes=2
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

# exec: kempner becomes the batch process, and gets the warning itself.
exec "$KEMPNER_PYTHON" -P -m kempner supervise "$@" --launcher srun
