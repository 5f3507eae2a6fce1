# shellcheck shell=bash
# Sourced by the scripts next to it, in the project's folder: the environment of a job. Any other way
# to yours? Change the lines between `begin` and `end`:
#   modules       module load python/3.12 cuda/12.6
#   conda, mamba  source ~/miniforge3/etc/profile.d/conda.sh; conda activate kempner
#   venv, uv      KEMPNER_PYTHON=/shared/me/project/.venv/bin/python
#   container     [slurm.container] in the configuration, for the ranks; kempner itself stays outside
set +u # what others have written may use variables that are not set
# begin
# That of the shell which submitted the job, or this folder's.
find_python() {
    local python
    for python in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} \
        ${CONDA_PREFIX:+"$CONDA_PREFIX/bin/python"} "$PWD/.venv/bin/python" python3; do
        if "$python" -P -m kempner --version &>/dev/null; then
            break
        fi
    done
    echo "$python"
}
KEMPNER_PYTHON=${KEMPNER_PYTHON:-$(find_python)}
# end
set -u

# A job that comes back has run before: what is away now is away for a moment.
comes_back=$((${SLURM_RESTART_COUNT:-0} > 0))
until found=$("$KEMPNER_PYTHON" -P -m kempner --version 2>&1); do
    if ((comes_back && SECONDS < 600)); then
        sleep 10
        if [[ $KEMPNER_PYTHON == python3 ]] && declare -F find_python >/dev/null; then
            KEMPNER_PYTHON=$(find_python)
        fi
        continue
    fi
    echo "$KEMPNER_PYTHON cannot run kempner on $HOSTNAME (${found##*$'\n'}): install kempner where" \
        "all nodes see it, and set KEMPNER_PYTHON to the path of its Python" >&2
    if ((comes_back)); then
        array=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
        scontrol requeue "${array:-$SLURM_JOB_ID}"
    fi
    exit 2
done
if [[ $KEMPNER_PYTHON == */* ]]; then # its torchrun, and what else it has, is found first
    export PATH="${KEMPNER_PYTHON%/*}:$PATH"
fi

require_config() {
    if [[ $# -eq 0 || $1 == --* ]]; then
        echo "usage: sbatch [options] SCRIPT CONFIG [--section.key=value]..." >&2
        exit 2
    fi
    if [[ ! -f $1 ]] && ! ((comes_back)); then # else kempner goes on with the one that worked
        echo "there is no configuration $1 in $PWD" >&2
        exit 2
    fi
}
