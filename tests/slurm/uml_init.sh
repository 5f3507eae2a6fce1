#!/usr/bin/env bash
# The first process of a machine of user-mode-linux, called by faults/test_memory_kill.py as
# `uml_init.sh` in FOLDER: a Slurm of one node under cgroup v2, and in it the job FOLDER/job.sh,
# whose output is FOLDER/job.out. Its kernel has the control groups that the host's may lack.
set -euo pipefail
folder=$(dirname "$0")
export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/root LANG=C.UTF-8 OMP_NUM_THREADS=1
export SLURM_CONF=$folder/etc/slurm.conf
trap 'echo o >/proc/sysrq-trigger; sleep infinity' EXIT

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
ip addr add 10.30.0.1/32 dev lo # a name that means 127.0.0.1 is refused by slurmd
hostname lab1
echo "10.30.0.1 lab1" >/run/hosts
mount --bind /run/hosts /etc/hosts

mkdir -p /run/state /run/spool
(umask 077 && head -c 128 /dev/urandom >/run/munge.key)
munged --force --key-file=/run/munge.key --socket=/run/munge.socket --pid-file=/run/munge.pid \
    --seed-file=/run/munge.seed --log-file=/run/munge.log
slurmctld -c
slurmd
until [[ $(sinfo -h -o %T) == idle ]]; do sleep 0.1; done
cd "$folder"
sbatch --wait --ntasks=1 --cpus-per-task=2 --mem=1000M --output=job.out job.sh
