"""What batch scripts call that is not installed here: each really runs what it is given.

`install` writes them into a folder for PATH; `MODULE` is for the environment of a job.
"""

from __future__ import annotations

from pathlib import Path

APPTAINER = """#!/bin/bash
# As `apptainer exec [OPTIONS] IMAGE`: process ids, mounts and a root of its own. Its first process
# gets no signal that it does not trap.
[ "$1" = exec ] || exit 99
shift
while [ "${1#-}" != "$1" ]; do
    [ "$1" = --bind ] && shift
    shift
done
export APPTAINER_CONTAINER=$1
shift
exec unshare --mount --pid --fork --mount-proc bash -c '
    mount -t tmpfs inside /mnt && mkdir /mnt/root && mount --rbind / /mnt/root || exit 98
    chroot /mnt/root env -C "$PWD" "$@" &
    wait $!
' in-container "$@"
"""

CONDA = """#!/bin/bash
# As conda where no shell has its function yet: it prints the function.
[ "$1 $2" = "shell.bash hook" ] || exit 99
echo 'conda() { [ "$1" = activate ] && export CONDA_DEFAULT_ENV="$2"; }'
"""

ACTIVATE = """# As conda's own, which scripts `source`.
eval "$(conda shell.bash hook)"
conda activate "$@"
"""

UV = """#!/bin/bash
# As `uv run`: a process that stays, and passes on a signal by itself.
[ "$1" = run ] || exit 99
shift
python "$@" &
trap 'kill -TERM $!' TERM
wait $!
wait $!
"""

TOOLS = {"apptainer": APPTAINER, "conda": CONDA, "activate": ACTIVATE, "uv": UV}

MODULE = {
    "BASH_FUNC_module%%": '() { case $1 in purge) unset LOADEDMODULES;; load) shift; for m; do '
    'export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}$m"; done;; *) return 1;; esac; }'
}  # fmt: skip
"""The function `module`, as sites export it to every shell that is a bash."""


def install(folder: Path) -> None:
    for name, text in TOOLS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "singularity").symlink_to("apptainer")
