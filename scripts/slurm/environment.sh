# shellcheck shell=bash
# Sourced by the scripts next to it, in the project's folder.

# The Python of the project, which every node must see under this path.
if [[ -z ${KEMPNER_PYTHON:-} ]]; then
    KEMPNER_PYTHON=$PWD/.venv/bin/python
    [[ -x $KEMPNER_PYTHON ]] || KEMPNER_PYTHON=$(command -v python3) || {
        echo "no Python found: run 'make install', or set KEMPNER_PYTHON" >&2
        exit 2
    }
fi

require_config() {
    if [[ $# -eq 0 || $1 == --* ]]; then
        echo "usage: sbatch [options] SCRIPT CONFIG [--section.key=value]..." >&2
        exit 2
    fi
    if [[ ! -f $1 ]]; then
        echo "there is no configuration $1 in $PWD" >&2
        exit 2
    fi
}
