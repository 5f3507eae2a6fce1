#!/usr/bin/env bash
# The first process of a node, given to bash by machines.py with NAME FOLDER, in new network, UTS,
# IPC, mount and PID namespaces: makes them look like a machine of their own, says its process id
# and reaps orphans for ever. When it ends, the kernel ends every process of the node.
set -euo pipefail
name=$1 folder=$2
read -r pid _ </proc/self/stat # as the outside numbers it: /proc is not this node's yet

hostname "$name"
ip link set lo up

# Another Slurm comes with the /usr around it; the machine's own stays for all else.
if [[ -n ${LAB_ROOT:-} ]]; then
    mount --rbind /usr/local "$LAB_ROOT/usr/local"
    mount --rbind "$LAB_ROOT/usr" /usr
fi

# A sysfs of this network, so that /sys/class/net shows the node's own interfaces. Of the control
# groups the node sees its own corner: two labs on one machine have nodes of the same names. Without
# root there are none.
mount --rbind /sys/fs/cgroup "$folder/mnt"
mount -t sysfs sysfs /sys
mount --rbind "$folder/mnt" /sys/fs/cgroup
freezer=/sys/fs/cgroup/freezer
if [[ -w $freezer ]]; then
    corner=$freezer/${folder//\//-}-$name
    mkdir -p "$corner"
    mount --bind "$corner" "$freezer"
fi
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$folder/etc/hosts" /etc/hosts

echo "$pid"
exec >/dev/null
while :; do
    sleep infinity &
    wait "$!" || true
done
