# shellcheck shell=bash
# Sourced by the scripts next to it, in the project's folder.

# The Python that has kempner, which every node must see under this path.
if [[ -z ${KEMPNER_PYTHON:-} ]]; then
    KEMPNER_PYTHON=$PWD/.venv/bin/python
fi
if ! command -v "$KEMPNER_PYTHON" >/dev/null; then
    echo "there is no Python at $KEMPNER_PYTHON on $HOSTNAME: install kempner where all nodes" \
        "see it, and set KEMPNER_PYTHON to the path of its Python" >&2
    exit 2
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
