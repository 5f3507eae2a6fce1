#!/bin/bash
# Runs by_hand.py until it is done. Two minutes before the time limit Slurm warns this script, the
# loop saves and leaves with 75, and the job goes back into the queue.
#SBATCH --time=01:00:00
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

python by_hand.py &
program=$!
trap 'kill -TERM "$program"' TERM
while kill -0 "$program" 2> /dev/null; do wait "$program"; done # a signal ends a wait
wait "$program"
code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
