#!/bin/bash
# Have one more node take part in a run, for as long as this job may use it. Submit as many as you
# like: short jobs of one node start soon.
#
#   sbatch scripts/slurm/join.sh RUN_DIR
#
# Edit the lines below for your cluster, or override them: sbatch -p PARTITION -A ACCOUNT ...
#SBATCH --job-name=kempner-join
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%j_%x.out
set -euo pipefail
trap '' TERM  # a warning must not end the job before kempner is there
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
source scripts/slurm/environment.sh
exec "$KEMPNER_PYTHON" -P -m kempner join "${1:?usage: sbatch [options] scripts/slurm/join.sh RUN_DIR}"
